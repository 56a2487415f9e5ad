# Ends the host's jobs, and runs COMMAND, when the controller was not there for SECONDS: sh deadman.sh ROOT SECONDS COMMAND.
# COMMAND is a file that only this user can read: it may hold the key that ends the machine. It is repeated until it succeeds.
ROOT=$1 SECONDS_ALLOWED=$2 COMMAND=$3
armed() { [ "$(cat "$ROOT/deadman.pid" 2>/dev/null)" = "$$" ]; }
echo $$ >"$ROOT/deadman.pid"
while sleep 1; do
  armed || exit 0 # another one is armed, or the host was disarmed
  now=$(date +%s)
  seen=$(stat -c %Y "$ROOT/controller" 2>/dev/null || echo 0)
  if [ "$((now - seen))" -gt "$SECONDS_ALLOWED" ]; then
    sh "$ROOT/end.sh" "$ROOT" 5
    date +%s >"$ROOT/ended-by-deadman"
    while armed && ! sh "$COMMAND"; do sleep 30; done
    exit 0
  fi
done
