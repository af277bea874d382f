#!/bin/sh
# TaskProlog: what it prints as `export NAME=VALUE` is in each task's environment.
echo "export RANK=$SLURM_PROCID"
echo "export LOCAL_RANK=$SLURM_LOCALID"
echo "export WORLD_SIZE=$SLURM_NTASKS"
