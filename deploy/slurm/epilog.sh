#!/bin/sh
# Epilog= of slurm.conf, see prolog.sh.
set -u
state=/run/zerotune-slurm

[ -d "$state/jobs" ] || exit 0
exec 9> "$state/lock"
flock 9
rm -f "$state/jobs/$SLURM_JOB_ID"
pid=$(cat "$state/pid" 2> /dev/null)
if [ -z "$(ls -A "$state/jobs")" ] && grep -qs all-users "/proc/${pid:-none}/cmdline"; then
    kill "$pid"
    rm -f "$state/pid"
fi
exit 0
