# Runs a script for the controller of EPOCH, unless a newer one was here: sh fence.sh ROOT EPOCH SCRIPT [ARGUMENT…].
# Ends with status 46 for an older controller; the first call of a newer one shuts the older out.
ROOT=$1 EPOCH=$2 SCRIPT=$3
shift 3
seen=$(cat "$ROOT/epoch" 2>/dev/null || echo 0)
if [ "$EPOCH" -lt "$seen" ]; then
  echo "epoch $EPOCH is over since $seen"
  exit 46
fi
if [ "$EPOCH" -gt "$seen" ]; then
  echo "$EPOCH" >"$ROOT/epoch.$$" && mv "$ROOT/epoch.$$" "$ROOT/epoch"
fi
touch "$ROOT/controller"
[ "$SCRIPT" = beat ] || exec sh "$ROOT/$SCRIPT" "$ROOT" "$@"
