# Runs one job on its host: sh job.sh FOLDER. Everything that the controller may ask is a file in FOLDER, renamed into place:
#   pid   this process and the job's process group      hb    the host's clock, once a second
#   log   what the job prints                           exit  the job's exit status, the last thing that is written
set -u
J=$1
cd "$J" || exit 1
publish() { cat >"$1.tmp" && mv "$1.tmp" "$1"; }
if [ -e cancel ]; then
  echo 143 | publish exit # as if SIGTERM had ended it
  exit 0
fi
# a session of its own for the job: all that it starts can be ended by its group
if [ -s user ]; then
  chown -R "$(cat user)" files
  AITA_JOB=$J setsid sh -c 'cd files && exec "$@"' job setpriv --reuid "$(cat user)" --regid "$(id -g "$(cat user)")" --clear-groups \
    --no-new-privs sh ../command >log 2>&1 </dev/null &
else
  AITA_JOB=$J setsid sh -c 'cd files && exec "$@"' job sh ../command >log 2>&1 </dev/null &
fi
C=$!
echo "$$ $C" | publish pid
(while kill -s 0 $$ 2>/dev/null; do date +%s | publish hb; sleep 1; done) &
H=$!
wait "$C"
R=$?
kill -s KILL -- "-$C" 2>/dev/null # what it left behind
kill "$H" 2>/dev/null
[ -e files/out ] || mkdir files/out
tar -cf result.tmp -C files out && mv result.tmp result.tar
echo "$R" | publish exit
