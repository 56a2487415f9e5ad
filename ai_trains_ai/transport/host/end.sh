# Ends jobs and everything that they started: sh end.sh ROOT GRACE [JOB]. Without JOB all of them, and their files go too.
ROOT=$1 GRACE=$2 ONLY=${3-}
# a job that is just being started has no process group yet: it is told not to begin, or waited for
for J in "$ROOT"/jobs/${ONLY:-*}; do
  [ -d "$J" ] && : >"$J/cancel"
done
for J in "$ROOT"/jobs/${ONLY:-*}; do
  i=0
  while [ -d "$J/started" ] && [ ! -f "$J/pid" ] && [ ! -f "$J/exit" ] && [ "$i" -lt 20 ]; do
    sleep 0.1
    i=$((i + 1))
  done
done
groups() {
  for J in "$ROOT"/jobs/${ONLY:-*}; do
    [ -f "$J/pid" ] && [ ! -f "$J/exit" ] && awk '{print $2}' "$J/pid"
  done
}
# processes that left the group, and those of a job that says it has ended: they carry its name
strays() {
  for J in "$ROOT"/jobs/${ONLY:-*}; do
    [ -d "$J" ] && grep -lsz -x -F "AITA_JOB=$J" /proc/[0-9]*/environ | cut -d/ -f3
  done
}
G=$(groups)
for g in $G; do kill -s TERM -- "-$g" 2>/dev/null; done
i=0
while [ "$i" -lt "$((GRACE * 10))" ]; do
  left=
  for g in $G; do kill -s 0 -- "-$g" 2>/dev/null && left=yes; done
  [ -z "$left" ] && break
  sleep 0.1
  i=$((i + 1))
done
for g in $G; do kill -s KILL -- "-$g" 2>/dev/null; done
for p in $(strays); do kill -s KILL "$p" 2>/dev/null; done
if [ -z "$ONLY" ]; then
  for J in "$ROOT"/jobs/*; do
    [ -f "$J/pid" ] && [ ! -f "$J/exit" ] && kill -KILL "$(awk '{print $1}' "$J/pid")" 2>/dev/null
  done
  rm -rf "$ROOT/jobs"
fi
exit 0
