"""The page docs/results.md and the figures in README.md, made from benchmarks/results.

python -m benchmarks results

The page has figures with a target and those in `Run.shown`; of a run without any target, all. If one was taken on
several machines or fabrics (`NAME@MACHINE`, `NAME@MACHINE:POLICY`), it has the worst, or the range if there is no
target.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from benchmarks.__main__ import programs
from benchmarks.lib.reporting import Result, figure
from benchmarks.recording.runs import README_FIGURES, ROOT, RUNS, Recorded, Run
from zerotune.store.counted import faster

PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
BEGIN, END = "<!-- figures: made by python -m benchmarks results -->", "<!-- end of figures -->"
SEALED = "sealed_"
INTRODUCTION = """\
# Results

No GPU was at hand: nothing here says how fast NCCL is. Times of training and of collectives are those of an
[emulated NCCL](design/emulated.md)'s virtual clock. What our own code costs was timed on the machine named above each
table; *load* is how many other processes wanted its cores. {missed} Where a figure was taken on
several fabrics or machines, the worst is shown. `sealed_` stands before figures of what is kept aside while the policy
is worked on. `benchmarks/results` has them all, with those without a target.

`python -m benchmarks record` runs the commands, `record --timed` those that need a quiet machine, and
`python -m benchmarks results` makes this page of what they leave. Each benchmark's `--help` explains its figures.
"""


def main() -> None:
    PAGE.write_text(page())
    README.write_text(readme())


def page() -> str:
    recorded = [(run, Recorded.load(run.path)) for run in RUNS if run.path.exists()]
    missing = [f"`{run.name}`" for run in RUNS if not run.path.exists()]
    sections = [_section(run, found) for run, found in recorded]
    n_missed = sum(section.count(" | **") for section in sections)
    missed = "The figures in **bold** miss their target." if n_missed else "All meet their targets."
    parts = [INTRODUCTION.format(missed=missed), *sections]
    if missing:
        parts.append(f"## Not recorded yet\n\n{', '.join(missing)}\n")
    return "\n".join(parts)


def _section(run: Run, recorded: Recorded) -> str:
    summary = (ast.get_docstring(ast.parse(programs()[run.benchmark].read_text())) or "").split("\n")[0]
    environment = recorded.environment
    machine = f"{environment['n_cores']} cores of {environment['cpu']}, {environment['memory_gib']} GiB"
    shown = [one for one in recorded.results if one.target or one.metric.partition("@")[0] in run.shown]
    lines = [
        f"## {run.name}",
        "",
        summary,
        "",
        f"`{recorded.command}`: {recorded.date}, commit {recorded.commit}, {machine}, load {environment['load']:.1f}, "
        f"torch {environment['torch']}",
        "",
        "| figure | value | target |",
        "|---|---|---|",
        *(_row(group) for group in _groups(shown or recorded.results)),
    ]
    return "\n".join([*lines, ""])


def _groups(results: Sequence[Result]) -> list[list[Result]]:
    """Groups of figures that differ only in their machine or fabric; `sealed_` figures follow those beside them."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for one in results:
        name, at, which = one.metric.partition("@")
        policy = which.rpartition(":")[2] if ":" in which else ""
        groups.setdefault((name, at, policy, one.target, one.unit), []).append(one)
    places = {key: place for place, key in enumerate(groups)}
    tuned = {key: (key[0].removeprefix(SEALED), *key[1:]) for key in groups}
    return [groups[key] for key in sorted(groups, key=lambda key: places.get(tuned[key], places[key]))]


def worst(group: Sequence[Result]) -> Result:
    """The figure that is farthest on the wrong side of its target, or the first if there is no side."""
    if group[0].target.startswith("<"):
        return max(group, key=lambda one: one.value)
    if group[0].target.startswith(">"):
        return min(group, key=lambda one: one.value)
    if span := re.fullmatch(r"(.*) to (.*)", group[0].target):
        middle = (float(span[1]) + float(span[2])) / 2
        return max(group, key=lambda one: abs(one.value - middle))
    return next((one for one in group if one.is_met is False), group[0])


def _row(group: Sequence[Result]) -> str:
    shown = worst(group)
    bare, _, which = shown.metric.partition("@")
    machine, colon, policy = which.rpartition(":") if ":" in which else (which, "", "")
    if len(group) == 1:
        return f"| {shown.metric} | {_value(shown)} | {shown.target} |"
    if not shown.target:
        low, high = (figure(limit(one.value for one in group)) for limit in (min, max))
        return f"| {bare}{colon}{policy}, {len(group)} of them | {low} to {high} {shown.unit} | |"
    n_missed = sum(one.is_met is False for one in group)
    missed = f", {n_missed} miss" if n_missed else ""
    return f"| {bare}{colon}{policy}, worst of {len(group)}: {machine}{missed} | {_value(shown)} | {shown.target} |"


def _value(one: Result) -> str:
    text = f"{figure(one.value)} {one.unit}".strip()
    return f"**{text}**" if one.is_met is False else text


def readme() -> str:
    """README.md with its table of figures and the demo's output as they should be."""
    before, _, rest = README.read_text().partition(BEGIN)
    table = "\n".join(["| figure | value | target |", "|---|---|---|", *_readme_rows()])
    text = f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
    demo = next(run for run in RUNS if run.name == "demo")
    return _with_demo(text, Recorded.load(demo.path).results) if demo.path.exists() else text


def _with_demo(text: str, results: Sequence[Result]) -> str:
    values = {one.metric: one.value for one in results}
    for row in ("step time", "exposed communication"):
        name = row.replace(" ", "_")
        off, on = (f"{values[f'{name}_us_agent_{agent}']:,.0f} us" for agent in ("off", "on"))
        change = faster(values[f"{name}_change_percent"], 1)
        line = f"│ {row:21s} │ {off:9s} │ {on:8s} │ {change:13s} │"
        text = re.sub(rf"^│ {row} .*$", line, text, count=1, flags=re.MULTILINE)
    return text


def _readme_rows() -> Iterator[str]:
    for shown in README_FIGURES:
        run = next(run for run in RUNS if run.name == shown.run)
        if not run.path.exists():
            yield f"| {shown.text} | not recorded yet | |"
            continue
        results = Recorded.load(run.path).results
        values = {one.metric: figure(one.value) for one in results if one.metric.isidentifier()}
        group = [one for one in results if re.fullmatch(shown.metric, one.metric)]
        yield f"| {shown.text.format(**values)} | {_value(worst(group))} | {worst(group).target} |"


if __name__ == "__main__":
    main()
