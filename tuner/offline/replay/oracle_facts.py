"""Where the oracle saves less than one expects of it, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from zerotune.tuner.offline.replay.engine import ShapeVerdict

ORACLE: Final = "oracle"
LEAST_PERCENT: Final = 0.05
"""A policy that is better by less than this counts as equally good."""


class CheaperPolicy(msgspec.Struct, frozen=True):
    """A policy whose cost is below the oracle's, over the collectives on which both can be judged."""

    policy: str
    below_percent: float
    n_collectives: int
    """Collectives for which it names a setting with a lower cost."""
    n_by_evidence: dict[str, int]
    """Of these, by what their costs rest on."""


class OracleFacts(msgspec.Struct, frozen=True):
    """What keeps the oracle from being the lowest possible cost."""

    n_collectives: int
    n_alone: int
    """Collectives for which only NCCL's own choice has a cost: the oracle can only keep it."""
    n_refused: int
    """Collectives without any cost."""
    cheaper: tuple[CheaperPolicy, ...] = ()


def oracle_facts(verdicts: Mapping[str, Sequence[ShapeVerdict]], has_others: Sequence[bool]) -> OracleFacts | None:
    """What is to be said of the oracle; None where it was not asked for.

    Args:
        verdicts: by policy, those on each shape, [n_shapes].
        has_others: whether another setting than NCCL's own choice has a cost, [n_shapes].
    """
    if ORACLE not in verdicts:
        return None
    oracle = verdicts[ORACLE]
    known = [one.cost_us is not None and one.baseline_us is not None for one in oracle]
    pairs = list(zip(oracle, known, has_others, strict=True))
    cheaper = [_cheaper(name, oracle, theirs) for name, theirs in verdicts.items() if name != ORACLE]
    return OracleFacts(
        n_collectives=sum(one.n_collectives for one in oracle),
        n_alone=sum(one.n_collectives for one, is_known, others in pairs if is_known and not others),
        n_refused=sum(one.n_collectives for one, is_known, _ in pairs if not is_known),
        cheaper=tuple(one for one in cheaper if one is not None),
    )


def _cheaper(name: str, oracle: Sequence[ShapeVerdict], theirs: Sequence[ShapeVerdict]) -> CheaperPolicy | None:
    oracle_us = their_us = 0.0
    n_by_evidence: dict[str, int] = {}
    for best, one in zip(oracle, theirs, strict=True):
        if best.cost_us is None or one.cost_us is None:
            continue
        oracle_us += best.n_collectives * best.cost_us
        their_us += one.n_collectives * one.cost_us
        if one.cost_us < best.cost_us:
            n_by_evidence[one.evidence] = n_by_evidence.get(one.evidence, 0) + one.n_collectives
    below_percent = 100 * (1 - their_us / oracle_us) if oracle_us else 0.0
    if below_percent < LEAST_PERCENT:
        return None
    return CheaperPolicy(name, below_percent, sum(n_by_evidence.values()), n_by_evidence)
