"""The files of a run: a line per step as soon as it ends, and a summary with the limits of the results."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.answers import answers
from benchmarks.gpu.outcome import Outcome

STEPS = "steps.jsonl"
SWEEP = "sweep.jsonl"
SHARED_GPU = """\
All ranks shared one GPU and talked over sockets on the loopback interface. So this shows what is right: that
the plugin loads, that a setting asked for is the setting that ran, that all ranks change plans together, that
sums stay what they are, that nothing hangs. It cannot show what is fast: kernels of several processes take turns
on the GPU{mps}, a kernel that waits for another rank burns the turn that this rank needs, and sockets stand
in the place of NVLink or InfiniBand. Durations are recorded with NCCL's own choice beside them and compare
settings under these conditions only. Overhead is that of the agent's code on the host, which is real; its share
of a step is not that of a real job.
"""
OWN_GPUS = """\
Each rank had a GPU of its own, on one node. Durations are those of its links; nothing is known of a network.
"""
EMULATED = """\
**No GPU took part**: this is a dry run of the same scripts on the emulated NCCL. It shows that the scripts work;
no figure in it is about NCCL.
"""
REHEARSED = """\
**No GPU took part**: this is a rehearsal. NCCL's own library and torch's CUDA build ran on a mock whose kernels compute
nothing: no value was looked at, and no time is a GPU's.
"""


class Record:
    """The files of one run in `folder`; results of an earlier run under the same conditions are kept."""

    def __init__(self, folder: Path, environment: dict[str, Any], *, afresh: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.environment = environment
        self._path = folder / STEPS
        lines = [] if afresh else _lines(self._path)
        if not lines or lines[0].get("environment", {}).get("identity") != environment["identity"]:
            for stale in (self._path, folder / SWEEP):
                stale.unlink(missing_ok=True)
            self._append({"environment": environment})
            lines = []
        self.outcomes = {line["step"]: Outcome(**line) for line in lines[1:]}

    def is_done(self, step: str) -> bool:
        return step in self.outcomes and self.outcomes[step].outcome == "ok"

    def add(self, outcome: Outcome) -> None:
        """Write it at once: the next step may take the machine down."""
        self.outcomes[outcome.step] = outcome
        self._append(asdict(outcome))

    def add_sweep(self, rows: Sequence[dict[str, Any]]) -> None:
        with (self.folder / SWEEP).open("a") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")

    def swept(self) -> list[dict[str, Any]]:
        return _lines(self.folder / SWEEP)

    def summarise(self) -> str:
        """Write summary.json and summary.md; returns the second."""
        document = {
            "environment": self.environment,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join([Path(sys.executable).name, *sys.argv]),
            "steps": [asdict(outcome) for outcome in self.outcomes.values()],
            "n_swept": len(self.swept()),
        }
        (self.folder / "summary.json").write_text(json.dumps(document, indent=1) + "\n")
        text = _markdown(document, answers(self.outcomes))
        (self.folder / "summary.md").write_text(text)
        return text

    def _append(self, document: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(document) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; a last line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _is_real(document: dict[str, Any]) -> bool:
    identity = document["environment"]["identity"]
    return not (identity.get("fabric") or identity.get("rehearsal"))


def _title(document: dict[str, Any]) -> str:
    return "zerotune on a GPU" if _is_real(document) else "Dry run, without a GPU"


def _worth(document: dict[str, Any]) -> str:
    """The limits of the figures."""
    environment = document["environment"]
    if environment["identity"].get("rehearsal"):
        return REHEARSED
    if not _is_real(document):
        return EMULATED
    mps = "" if environment.get("mps") else " (no MPS)"
    return OWN_GPUS if environment["identity"].get("n_gpus", 1) > 1 else SHARED_GPU.format(mps=mps)


def _markdown(document: dict[str, Any], told: Sequence[tuple[str, str]]) -> str:
    environment = document["environment"]
    lines = [f"# {_title(document)}", "", _worth(document)]
    lines += ["| question | answer |", "|---|---|", *(f"| {question} | {answer} |" for question, answer in told), ""]
    facts = {**environment["identity"], "MPS": environment.get("mps", False)}
    lines += [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    lines += [f"- date: {document['date']}", f"- command: `{document['command']}`", ""]
    lines += ["| step | outcome | seconds | what was seen |", "|---|---|---|---|"]
    for step in document["steps"]:
        seen = "; ".join(f"{name} {_short(value)}" for name, value in step["results"].items())
        seen_there = "; ".join(filter(None, [step["reason"], seen])).replace("|", "/").replace("\n", " ")
        lines.append(f"| {step['step']} | {step['outcome']} | {step['seconds']:.1f} | {seen_there} |")
    lines += ["", f"{document['n_swept']} settings measured, see {SWEEP}."]
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
