"""Child of the daemon: fits one fabric's model and writes it to stdout as msgpack.

python -m zerotune.tuner.modeling.training_process STORE FABRIC_ID
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from ...store.errors import StoreError
from ...store.parent_process import end_with_parent
from ...store.sqlite.database import Store
from .trainer import train


def main(store_path: str, fabric_id: str) -> int:
    """Write the model; write nothing if there are too few measurements."""
    end_with_parent(signal.SIGKILL)  # a daemon that was killed needs no model
    os.nice(10)
    try:
        with Store.open(store_path, read_only=True) as store:
            model = train(store, fabric_id)
    except StoreError as error:  # for example, the store was removed: one line for the daemon's log
        print(f"zerotune: nothing can be learned: {error}", file=sys.stderr)
        return 2
    if model is not None:
        sys.stdout.buffer.write(msgspec.msgpack.encode(model))
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
