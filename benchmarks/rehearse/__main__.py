"""Run a command whose Python processes find GPUs that are not there.

python -m benchmarks.rehearse h100_node -- torchrun --nproc-per-node 2 train.py
python -m benchmarks.rehearse h100_node --slower 50 -- zerotune launch -- torchrun ...

Kernels compute nothing, and times follow the fabric's file: neither values nor times are real.
NCCL_LIBRARY names a libnccl.so.2 of another release than torch's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from benchmarks.rehearse.mock_gpu import QUEUE
from benchmarks.rehearse.settings import AHEAD, FABRIC, MOVES_MB, SLOWER, Rehearsal, environment_of
from zerotune.agent.nccl.compiled import cache_folder
from zerotune.agent.nccl.mock_cuda.mock import refuse_beside_a_driver
from zerotune.store.errors import PluginError, UserError


def main() -> int:
    """Replaces this process by the command; returns 2 if that is impossible."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m benchmarks.rehearse FABRIC [--slower FACTOR] [--moves-mb MB] [--ahead KERNELS] "
        "-- COMMAND...",
    )
    parser.add_argument("fabric", help="by name or file; it must name a machine")
    parser.add_argument("--slower", default="1", help="how much slower than the fabric all is, for slow hosts")
    parser.add_argument("--moves-mb", default="1e12", help="larger buffers do not travel, for slow hosts")
    parser.add_argument("--ahead", default=str(QUEUE), help=f"kernels that hosts may run ahead, 0 to {QUEUE}")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:end]), words[end + 1 :]
    asked = {
        **os.environ,
        FABRIC: options.fabric,
        SLOWER: options.slower,
        MOVES_MB: options.moves_mb,
        AHEAD: options.ahead,
    }
    if not command or shutil.which(command[0]) is None:
        parser.error(f"no such command: {command[0] if command else 'give one after --'}")
    try:
        refuse_beside_a_driver()
        environment = environment_of(Rehearsal.from_environment(asked), asked, cache_folder() / "rehearsal")
    except (UserError, PluginError, OSError) as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return 2
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    sys.exit(main())
