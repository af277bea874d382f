"""Files and models as people have them: how many are read rightly, refused with a remedy, or read wrongly.

Run: python -m benchmarks field [--quick] [--json]

`files.json` has the true contents of each file in `files/`, or the words of a refusal that help. A silent error is a
file or model that is read with other numbers than the true ones. A model's number of parameters is the published one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.reporting import Result, options_of, report, say
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.twin.twin import topology_file
from zerotune.store.errors import UserError
from zerotune.store.records import CommunicatorClass, Phase
from zerotune.tuner.advice.models.huggingface import from_config
from zerotune.tuner.offline.replay.plans import plan_rows
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.measuring import UserFacts

HERE = Path(__file__).parent
HERE_IT_RUNS = CommunicatorClass(16, 2)
"""The communicator that tables of choices are read for."""
TOLERANCE = 1e-3
"""Of a model's parameters."""


class Outcome(NamedTuple):
    is_read: bool
    is_right: bool
    is_refused_with_remedy: bool


def _found(case: dict[str, Any]) -> tuple[str, Any]:
    """The kind of comparison, and the values that were read."""
    path = HERE / "files" / case["file"]
    if "n_rows" in case:
        return "n_rows", sum(row.phase is Phase.other for row in plan_rows(path, [HERE_IT_RUNS]))
    if path.suffix == ".xml":
        with topology_file(str(path), case.get("gpu"), case.get("nic_gbps")) as whole:
            machine = read_machine(whole)
        return "machine", [len(machine.gpus), min(gpu.n_nvlinks for gpu in machine.gpus), len(machine.nics)]
    trace = read_trace(path)
    n_ranks = [int(n) for one in trace.portions(UserFacts(is_default=True, n_nodes=1)) for n in one.rows["n_ranks"]]
    if not n_ranks:
        words = "; ".join(map(trace.summary.with_examples, trace.summary.unusable))
        raise UserError(f"{path.name}: {words}", "--n-ranks" if "number of ranks" in words else "")
    return ("n_measured", len(n_ranks)) if "n_measured" in case else ("n_ranks", sorted(set(n_ranks)))


def outcome_of(case: dict[str, Any]) -> Outcome:
    try:
        name, value = _found(case)
    except UserError as error:
        return Outcome(False, False, "remedy" in case and case["remedy"] in str(error))
    is_right = name in case and case[name] == value
    if not is_right:
        say(f"{case['file']} ({case['says']}): {name} is {value}")
    return Outcome(True, is_right, False)


def _is_right_model(case: dict[str, Any]) -> bool | None:
    """Its parameters are the published ones; None: it is refused."""
    try:
        n_parameters = from_config(case["config"], case["name"]).n_parameters
    except UserError as error:
        say(str(error))
        return None
    is_right = bool(abs(n_parameters / case["n_parameters"] - 1) <= TOLERANCE)
    if not is_right:
        say(f"{case['name']} has {case['n_parameters']:,} parameters, not {n_parameters:,.0f}")
    return is_right


def run() -> list[Result]:
    cases = json.loads((HERE / "files.json").read_text())
    outcomes = [outcome_of(case) for case in cases]
    published = json.loads((HERE / "published_models.json").read_text())
    models = [_is_right_model(case) for case in published]
    n_read, n_right = (sum(getattr(one, name) for one in outcomes) for name in ("is_read", "is_right"))
    n_refused = sum(one.is_refused_with_remedy for one in outcomes)
    wrong = n_read - n_right + models.count(False)
    return [
        Result("files_tried", len(cases), "files"),
        Result("files_read", n_read, "files"),
        Result("files_right", n_right, "files", target=str(sum("remedy" not in case for case in cases))),
        Result("files_refused_with_remedy", n_refused, "files", target=str(sum("remedy" in case for case in cases))),
        Result("models_tried", len(models), "models", target=">= 60"),
        Result("models_right", models.count(True), "models", target=str(len(models))),
        Result("silent_errors", wrong, "files and models", target="0"),
    ]


def main() -> None:
    parser = options_of(__doc__, quick="the same: all of it takes seconds")
    arguments = parser.parse_args()
    report("field", run(), as_json=arguments.json)


if __name__ == "__main__":
    main()
