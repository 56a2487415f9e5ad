# Publishes a staged job and starts it: sh submit.sh ROOT STAGE JOB. Says "started", or "known" for a job that is there already.
# Renaming a folder onto an existing one fails, so one submit wins, however often it is repeated.
set -eu
ROOT=$1 STAGE=$2 JOB=$ROOT/jobs/$3
mkdir -p "$ROOT/jobs" "$STAGE/files"
# large files were sent once, under their hashes, and are copied: a job may change its own. Lines: hash, two blanks, path
if [ -f "$STAGE/blobs" ] && [ ! -d "$JOB" ]; then
  while read -r hash path; do
    mkdir -p "$(dirname "$STAGE/files/$path")"
    cp "$ROOT/blobs/$hash" "$STAGE/files/$path"
  done <"$STAGE/blobs"
  (cd "$STAGE/files" && sha256sum -c --status ../blobs) || { rm -rf "$ROOT/blobs"; echo "a file changed on the host" >&2; exit 1; }
fi
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
