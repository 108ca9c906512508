#!/usr/bin/env bash
# Train on several machines that are started by hand. On each of them, in the project's folder:
#
#     bash examples/cluster/two_nodes.sh <number of this machine, from 0> <address of machine 0>
#
# The settings below can be given in the environment: PROCESSES=4 bash examples/cluster/…
set -euo pipefail

node_rank=${1:?"give the number of this machine, from 0"}
address=${2:?"give the address of machine 0"}
nodes=${NODES:-2}
processes=${PROCESSES:-1}               # ranks on each machine, one for each device
port=${PORT:-29500}                     # of the rendezvous store; keep it within a closed network
folder=${FOLDER:-/shared/run}           # every machine must see it
script=${SCRIPT:-examples/train.py}

export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-eth0}   # `ip addr` lists the interfaces
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}            # for each process

exec torchrun --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$processes" \
    --master-addr "$address" --master-port "$port" \
    "$script" --folder "$folder" --steps "${STEPS:-100}"
