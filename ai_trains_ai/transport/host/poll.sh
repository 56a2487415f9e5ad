# One line of state, then the log from a byte offset: sh poll.sh ROOT JOB OFFSET LIMIT.
# The line: there|exit|alive|heartbeat|now|since, empty where a file isn't there.
ROOT=$1 JOB=$ROOT/jobs/$2
[ -d "$JOB" ] || { echo "no||||"; exit 0; }
# the heartbeat is read before the process that is written first: one without the other would look like a lost job
H=$(cat "$JOB/hb" 2>/dev/null)
E=$(cat "$JOB/exit" 2>/dev/null)
P=$(cat "$JOB/pid" 2>/dev/null)
A=
# a zombie still has a folder in /proc
[ -n "$P" ] && grep -q '^State:.[^ZX]' "/proc/${P% *}/status" 2>/dev/null && A=yes
# read the exit record again: the job may have ended in between
[ -z "$E" ] && [ -z "$A" ] && E=$(cat "$JOB/exit" 2>/dev/null)
echo "yes|$E|$A|$H|$(date +%s)|$(stat -c %Y "$JOB/started" 2>/dev/null)"
[ -f "$JOB/log" ] && tail -c "+$3" "$JOB/log" | head -c "$4"
exit 0
