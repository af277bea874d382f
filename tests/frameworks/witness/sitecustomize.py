"""On PYTHONPATH of a job under test: writes down what the emulated NCCL did in each process, when it ends.

Not part of any script: Python runs it at start-up, after the agent's own.
"""

import atexit
import importlib.util
import json
import os
import sys

JOURNAL = "zerotune.agent.nccl.emulated.journal"


class _KeepCalls:
    """Has the journal keep every call, from the moment it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != JOURNAL:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.journal().keep_calls = True

        spec.loader.exec_module = exec_module
        return spec


def _testify():
    if JOURNAL not in sys.modules:
        return
    journal = sys.modules[JOURNAL].journal()
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK"))
    calls = [
        (call.comm_id, int(call.collective), call.message_bytes, *_setting(call.candidate))
        for call in sorted(journal.calls, key=lambda call: call.sequence)
        if call.candidate.algorithm is not None
    ]
    document = {"rank": int(rank), "calls": calls, "n_disagreements": journal.n_disagreements}
    if os.environ["ZEROTUNE_AGENT"] == "1":
        from dataclasses import asdict

        from zerotune.agent.activate import installed
        from zerotune.agent.nccl import library

        document["counters"] = asdict(library.load().counters())
        document["n_errors"] = installed.session.n_errors
    with open(os.path.join(os.environ["ZEROTUNE_WITNESS"], f"{os.getpid()}.json"), "w") as file:
        json.dump(document, file)


def _setting(candidate):
    return int(candidate.algorithm), int(candidate.protocol), candidate.n_channels


if "ZEROTUNE_WITNESS" in os.environ:
    sys.meta_path.insert(0, _KeepCalls())
    atexit.register(_testify)
