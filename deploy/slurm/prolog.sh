#!/bin/sh
# Prolog= of slurm.conf, with Epilog=epilog.sh: a node's first job starts the service for all users, its last one ends it.
# Nodes where systemd runs the service (deploy/systemd/zerotune.service) need neither.
set -u
zerotune=/opt/zerotune/bin/zerotune
options="--share private"  # several nodes: --listen tcp://*:* --curve-keys /etc/zerotune/keys, with a folder for each UID
state=/run/zerotune-slurm
# Here, since Slurm gives a prolog no environment.
here=$(dirname "$0")
[ ! -r "$here/zerotune.env" ] || . "$here/zerotune.env"  # sets them anew

mkdir -p "$state/jobs"
exec 9> "$state/lock"
flock 9
: > "$state/jobs/$SLURM_JOB_ID"
pid=$(cat "$state/pid" 2> /dev/null)
if ! grep -qs all-users "/proc/${pid:-none}/cmdline"; then
    set -f  # tcp://*:* is no pattern of files
    # A session of its own: Slurm ends what is left of a prolog's.
    # shellcheck disable=SC2086
    setsid "$zerotune" daemon --all-users $options < /dev/null >> "$state/log" 2>&1 9>&- &
    echo $! > "$state/pid"
    tries=100
    while [ ! -S /run/zerotune/door.sock ] && kill -0 $! 2> /dev/null && [ $((tries -= 1)) -gt 0 ]; do sleep 0.1; done
fi
exit 0  # a prolog that fails drains its node, and training can do without us
