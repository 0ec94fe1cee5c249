#!/usr/bin/env bash
# Starts several processes of one run on this machine: one per GPU, each on its GPU's NUMA node. Without an agent:
# `python -m experiments.supervise` does the same, and watches them (docs/aegis.md).
#
#   launch/node.sh 4 .venv/bin/python -m experiments.pretrain --workdir=runs/four      this machine alone
#   NODE=3 NODES=16 JAX_COORDINATOR_ADDRESS=host:port launch/node.sh 8 COMMAND         the fourth of sixteen
#
# It forwards SIGTERM and SIGINT, and ends when all have ended, with their highest exit code. A process that still runs
# NODE_WAIT_SECONDS (120) after the first has ended, for instance a stopped one, is killed and counts as 1. With 75 and no
# signal a run has saved at the border to a phase with another mesh: then all are started again, here and on the other
# nodes.
set -euo pipefail

if [ $# -lt 2 ] || ! [ "$1" -gt 0 ] 2>/dev/null; then
  echo "error: launch/node.sh PROCESSES COMMAND ...; PROCESSES is how many to start here" >&2
  exit 2
fi
here=$1
shift
node=${NODE:-0}
nodes=${NODES:-1}
if [ "$nodes" -gt 1 ] && [ -z "${JAX_COORDINATOR_ADDRESS:-}" ]; then
  echo "error: NODES=$nodes, but JAX_COORDINATOR_ADDRESS is not set; give host:port of node 0" >&2
  exit 2
fi
export JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-localhost:$((20000 + RANDOM % 10000))}
export JAX_NUM_PROCESSES=$((nodes * here))

# NUMA nodes of the accelerators, in the order of their PCI addresses, which is the order the drivers number them in.
numa=()
for device in "${PCI_DEVICES:-/sys/bus/pci/devices}"/*; do
  # 0x1200: processing accelerator (MI300X), 0x0302: 3D controller (H100, H200)
  case $(cat "$device/class" 2>/dev/null || true) in
    0x1200* | 0x0302*) numa+=("$(cat "$device/numa_node" 2>/dev/null || echo -1)") ;;
  esac
done

pids=()
asked=0
trap 'asked=1; kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT HUP

set -m # each in its own group: Ctrl-C reaches them once, from here, because a second signal ends them at once
start() {
  pids=()
  for ((i = 0; i < here; i++)); do
    near=()
    one=()
    if [ "${#numa[@]}" -ge "$here" ]; then
      one=("JAX_LOCAL_DEVICE_IDS=$i")
      # Else batches and checkpoints pass the link between the sockets on their way to and from the GPU.
      if [ "${numa[i]}" -ge 0 ] && command -v numactl >/dev/null; then
        near=(numactl "--cpunodebind=${numa[i]}" "--preferred=${numa[i]}")
      fi
    fi
    env "JAX_PROCESS_ID=$((node * here + i))" ${one[@]+"${one[@]}"} ${near[@]+"${near[@]}"} "$@" &
    pids+=($!)
  done
}

some_ended() {
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2>/dev/null || return 0
  done
  return 1
}

highest=75
while [ "$highest" -eq 75 ] && [ "$asked" -eq 0 ]; do
  start "$@"
  if [ "$asked" -eq 1 ]; then kill -TERM "${pids[@]}" 2>/dev/null || true; fi # it came between two of them
  until some_ended; do wait -fn "${pids[@]}" || true; done # a signal ends `wait`, not the process
  since=$SECONDS
  highest=0
  for pid in "${pids[@]}"; do
    code=""
    while kill -0 "$pid" 2>/dev/null; do
      if [ $((SECONDS - since)) -ge "${NODE_WAIT_SECONDS:-120}" ]; then
        echo "error: process $pid still runs ${NODE_WAIT_SECONDS:-120} s after another has ended, and is killed" >&2
        kill -KILL -- "-$pid" 2>/dev/null || true
        code=1
        break
      fi
      sleep 0.1
    done
    if [ -z "$code" ]; then
      code=0
      wait "$pid" || code=$?
    fi
    if [ "$code" -gt "$highest" ]; then highest=$code; fi
  done
done
exit "$highest"
