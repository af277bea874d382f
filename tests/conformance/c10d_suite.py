"""Torch's own tests of torch.distributed, as its wheel ships them, on the backend `emulated_nccl`.

    BACKEND=gloo WORLD_SIZE=4 python tests/conformance/c10d_suite.py OUTCOMES.json [NAME ...]

They run as tests of the backend BACKEND, of which torch's tests believe to know what it has: `emulated_nccl`, or a name
that scripts ask for, as under `zerotune launch --fabric`. OUTCOMES.json gets {test: [outcome, why]}.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.common_distributed import DistTestCases

from zerotune.agent import emulation
from zerotune.agent.nccl.emulated import BACKEND


def torchs_tests() -> type[unittest.TestCase]:
    """Torch's test case; its module reads the environment and the features of backends as it is imported."""
    asked = os.environ["BACKEND"]
    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(BACKEND)
    if asked != BACKEND:
        emulation.REPLACED = frozenset({asked})
        emulation.install()
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class EmulatedNccl(TestDistBackend, DistributedTest._DistTestBase):
        """Ranks are forks of this process, which does nothing itself: torch is imported once, not a thousand times."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, *arguments: Any) -> None:
            if dist.get_backend() != BACKEND:  # else a test could pass on a backend that is another one
                raise RuntimeError(f"the default group's backend is {dist.get_backend()}")
            super().run_test(*arguments)

    return EmulatedNccl


class _Outcomes(unittest.TestResult):
    """Each test's outcome and why, with a line of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.by_test: dict[str, tuple[str, str]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._note(test, "passed", "")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        name = _name(test)
        print(f"{name}: {' '.join(self.by_test[name])[:200]}", file=sys.stderr, flush=True)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", _what_went_wrong(err[1]))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.addFailure(test, err)

    def _note(self, test: unittest.TestCase, outcome: str, why: str) -> None:
        self.by_test[_name(test)] = outcome, why


def _name(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2]


def _what_went_wrong(error: BaseException) -> str:
    """The line of a rank's traceback that names the error, or else the last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if re.match(r"[\w.]*(Error|Exception|Lost|Timeout)\b", line)), lines[-1])


def main() -> None:
    """Run the tests and write their outcomes."""
    case = torchs_tests()
    out, names = Path(sys.argv[1]), sys.argv[2:] or unittest.defaultTestLoader.getTestCaseNames(case)
    outcomes = _Outcomes()
    unittest.TestSuite(case(name) for name in names).run(outcomes)
    out.write_text(json.dumps(outcomes.by_test, indent=0) + "\n")


if __name__ == "__main__":
    main()
