"""Compares nodes' answers: one finding for each difference between nodes, and for each problem of single nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ...agent.machine.nccl_variables import COSTS
from ...store.counted import counted
from .asking import Asked
from .findings import Finding, Status, ok, problem, warning
from .node import Fact

MAX_NAMED: Final = 8
"""Most nodes named in one line; the others are counted."""
STOPPING: Final = frozenset({"NCCL", "zerotune"})
"""Software that must be equal on all nodes: with several versions NCCL ends jobs, and zerotune tunes none."""
CHOOSING: Final = frozenset(
    f"NCCL_{name}"
    for name in (
        *("ALGO", "PROTO", "NTHREADS", "LL128_NTHREADS", "BUFFSIZE", "LL_BUFFSIZE", "LL128_BUFFSIZE"),
        *("NET", "IB_DISABLE", "COLLNET_ENABLE", "NVLS_ENABLE", "PAT_ENABLE", "P2P_NET_CHUNKSIZE"),
    )
)
"""Variables with which ranks make choices that do not fit together."""

Node = dict[tuple[str, str], Fact]


def compare(asked: Asked) -> list[Finding]:
    """Differences between the nodes, and problems of some of them."""
    answers: dict[str, list[Fact]] = defaultdict(list)
    for fact in asked.facts:
        answers[fact.answer].append(fact)
    nodes: dict[str, Node] = {}
    broken = []
    for label, facts in _labelled(answers.values()):
        found: Node = {(one.kind, one.name): one for one in facts}
        end = found.pop(("end", ""), None)
        found.pop(("start", ""), None)
        if end is None or end.value != str(len(found)):
            broken.append(label)
        else:
            nodes[label] = found
    return [*_of_answers(asked, nodes, broken), *_differences(nodes), *_troubles(nodes)]


def _labelled(answers: Iterable[list[Fact]]) -> Iterator[tuple[str, list[Fact]]]:
    """Each answer with its node's name; a second one of the same node is NAME#2."""
    seen: Counter[str] = Counter()
    for facts in answers:
        node = facts[0].node
        seen[node] += 1
        yield (node if seen[node] == 1 else f"{node}#{seen[node]}"), facts


def _of_answers(asked: Asked, nodes: Mapping[str, Node], broken: list[str]) -> Iterator[Finding]:
    if nodes:
        yield ok("answers", f"{counted(len(nodes), 'node')}: {_names(nodes)}")
    if broken:
        found = f"no whole answer of {_names(broken)}"
        yield problem("answers", found, "run `zerotune doctor` there; let the launcher label lines, as `srun --label`")
    if asked.failure:
        yield problem("answers", asked.failure, "see that each node has `zerotune` in its PATH")
    elif not nodes and not broken:
        yield problem("answers", "no node answered", "see that the launcher runs the command behind it")
    if asked.missing:
        found = f"nothing came from nodes of this allocation: {_names(asked.missing)}"
        yield warning("answers", found, "let the launcher start one task on each node")


def _differences(nodes: Mapping[str, Node]) -> Iterator[Finding]:
    keys = dict.fromkeys(key for node in nodes.values() for key in node if key[0] != "finding")
    for kind, name in keys:
        of_value: dict[str, list[str]] = defaultdict(list)
        for label, node in nodes.items():
            fact = node.get((kind, name))
            of_value[(fact.value or "none") if fact else "not set"].append(label)
        if len(of_value) == 1:
            continue
        values = sorted(of_value.items(), key=lambda one: -len(one[1]))
        found = f"{name}: " + "; ".join(f"{value} on {_names(labels)}" for value, labels in values)
        if kind == "version":
            yield _of_version(name, found)
        elif kind == "hardware":
            yield warning("hardware", found, "the slowest node sets the pace: train on equal ones")
        else:
            yield _of_variable(name, found)


def _of_version(name: str, found: str) -> Finding:
    if name in STOPPING:
        return problem("versions", found, "install one version on all nodes: nothing is tuned, or NCCL ends the job")
    return warning("versions", found, "install one version on all nodes")


def _of_variable(name: str, found: str) -> Finding:
    if name in CHOOSING:
        return problem("variables", found, "set it alike on all nodes: ranks that choose differently can hang")
    if name in COSTS:
        return warning("variables", found, "set it alike on all nodes")
    return ok("variables", f"{found}; this may be right")


def _troubles(nodes: Mapping[str, Node]) -> Iterator[Finding]:
    """Findings of single nodes, one for all nodes with the same."""
    having: dict[tuple[str, Status, str, str], list[str]] = defaultdict(list)
    for label, node in nodes.items():
        for (kind, _), one in node.items():
            if kind == "finding":
                having[one.name, one.status, one.value, one.remedy].append(label)
    for (code, status, found, remedy), labels in having.items():
        yield Finding(code, status, f"{_names(labels)}: {found}", remedy)


def _names(labels: Iterable[str]) -> str:
    names = sorted(labels)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return " ".join(names[:MAX_NAMED]) + more
