#!/usr/bin/env bash
# Makes this pod a node of the Ray cluster that offers nothing, and serves the API on it, next to controller and store.
#
# HEAD          host:port of Ray's head
# POD_IP        address of this pod, which trainers and engines reach
# STORE_BYTES   Ray's object store
# VERBOSE       --verbose or nothing
# LEAVE_SECONDS how long `serve` may take to leave its fleet when it is told to end; 15 when not given
set -euo pipefail

tmp=${TMPDIR:-/tmp} # Ray's rule, too
log=$tmp/ray-start.log
rm -rf "$tmp/ray" "$log" # of a container before this one

node='' serve=''
leave() {
  # Told to end it leaves the engines (leave_fleet), which belong to the RayCluster, and the next `serve` adopts them.
  kill -TERM "$serve" 2>/dev/null || return 0
  for _ in $(seq $((${LEAVE_SECONDS:-15} * 5))); do
    sleep 0.2
    kill -0 "$serve" 2>/dev/null || return 0
  done
  kill -KILL "$serve" 2>/dev/null || true # it hangs, as it may where Ray is gone; that leaves them, too
}
end() {
  [ -z "$serve" ] || leave
  [ -z "$node" ] || kill -TERM "$node" 2>/dev/null || true
  for child in $serve $node; do
    wait "$child" 2>/dev/null || true
  done
}
trap 'end; exit 0' TERM INT

until ray health-check --address "$HEAD" >/dev/null 2>&1; do
  echo "waiting for Ray's head at $HEAD"
  sleep 2
done

ray start --address="$HEAD" --node-ip-address="$POD_IP" --num-cpus=0 --num-gpus=0 --object-store-memory="$STORE_BYTES" \
  --disable-usage-stats --block >"$log" 2>&1 &
node=$!

until grep -q "Ray runtime started" "$log"; do
  kill -0 "$node" 2>/dev/null || { cat "$log"; exit 1; }
  sleep 0.5
done

weightsync serve --config /etc/weightsync/fleet.toml ${VERBOSE:+"$VERBOSE"} &
serve=$!

# Whichever ends first, the other is of no use: a `serve` whose node has lost the head can't reach its fleet any more.
code=0
wait -n "$serve" "$node" || code=$?
kill -0 "$node" 2>/dev/null || { tail -n 20 "$log"; code=1; }
end
exit "$code"
