#!/bin/sh
# One rank under mpirun, which tells ranks apart by names of its own:
#   mpirun -np 16 --map-by ppr:8:node -x MASTER_ADDR=$(hostname) rank.sh train.py --epochs 3
# LAUNCH_OPTIONS: further ones of `zerotune launch`. Of a node's ranks one starts the daemon.
set -eu
export RANK="${OMPI_COMM_WORLD_RANK:-${PMI_RANK:?is started by neither Open MPI, MPICH nor Intel MPI}}"
export WORLD_SIZE="${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-}}"
export LOCAL_RANK="${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-$RANK}}"
export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MASTER_PORT="${MASTER_PORT:-29500}"
# shellcheck disable=SC2086
exec zerotune launch ${LAUNCH_OPTIONS:-} -- python "$@"
