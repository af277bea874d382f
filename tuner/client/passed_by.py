"""Collectives that NCCL runs without asking a tuner, in words."""

from __future__ import annotations

from typing import Final

from ...store.records.passages import PassageKind, Passages

_WORDS: Final = {
    PassageKind.unknown: "collectives without a decision (why is not known)",
    PassageKind.symmetric: "symmetric kernels",
    PassageKind.copy_engine: "copy engines",
    PassageKind.point_to_point: "sends and all_to_all",
}


def passed_by(passages: Passages) -> str:
    """Calls that NCCL ran without asking a tuner, with their shares of all observed calls; empty without any."""
    all_bytes = sum(each.message_bytes for each in passages.kinds)
    all_us = sum(each.kernel_us for each in passages.kinds)
    found = []
    for each in passages.kinds:
        if each.kind is PassageKind.decided:
            continue
        shares = [f"{_percent(each.message_bytes, all_bytes)} of bytes"]
        shares.append(f"{_percent(each.kernel_us, all_us)} of time" if each.n_timed else "not timed")
        found.append(f"{_WORDS[each.kind]}: {', '.join(shares)}")
    if n := passages.n_one_rank_communicators:
        found.append(f"{n:,} communicator{'s' * (n > 1)} of one rank, whose calls NCCL tells no plugin of")
    return "; ".join(found)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
