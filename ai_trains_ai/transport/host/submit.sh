# Publishes a staged job and starts it: sh submit.sh ROOT STAGE JOB. Says "started", or "known" for a job that is there already.
# Renaming a folder onto an existing one fails, so one submit wins, however often it is repeated.
set -eu
ROOT=$1 STAGE=$2 JOB=$ROOT/jobs/$3
mkdir -p "$ROOT/jobs"
if ! mv -T "$STAGE" "$JOB" 2>/dev/null; then
  rm -rf "$STAGE"
  [ -d "$JOB" ] || { echo "can't create $JOB" >&2; exit 1; }
fi
# whoever makes this folder starts the job: also one that was published by a submit that broke before the start
if mkdir "$JOB/started" 2>/dev/null; then
  setsid nohup sh "$JOB/job.sh" "$JOB" </dev/null >/dev/null 2>&1 &
  echo started
else
  echo known
fi
