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
    # The next job's service begins when this one has written what it knows.
    tries=100
    while kill -0 "$pid" 2> /dev/null && [ $((tries -= 1)) -gt 0 ]; do sleep 0.1; done
fi
exit 0
