"""Messages between the sweep and its worker processes: one JSON document per line."""

from __future__ import annotations

from typing import Final

import msgspec

from ....store.records import Candidate, Collective

ASK_CHUNK_SIZE: Final = "ask-chunk-size"
"""Argument of a worker whose NCCL asks the plugin for chunk sizes."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A worker has its process group and knows the settings that NCCL offers."""

    n_nodes: int
    max_channels: int
    cells: dict[str, tuple[tuple[int, int], ...]]
    """(algorithm, protocol) that NCCL offers, by the collective's name."""
    fabric_id: str
    fabric: dict[str, str | int | float | bool]
    costs: dict[str, dict[int, tuple[tuple[float, ...], ...]]] = {}
    """NCCL's own cost tables by collective and bytes; empty on an emulated fabric, whose file gives them."""
    asks_chunk_size: bool = False
    """Whether NCCL asks for the chunk sizes of a plan."""


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Run one setting: switch to its plan, warm up, then run `n_repeats` timed collectives."""

    epoch: int
    collective: Collective
    message_bytes: int
    candidate: Candidate
    n_warmup: int
    n_repeats: int
    check: bool
    """Also verify the result of one collective."""


class MeasuredCalls(msgspec.Struct, frozen=True, tag="measured"):
    """Durations in the order of the calls, and the setting that really ran."""

    epoch: int
    duration_us: tuple[float, ...]
    algorithm: int
    protocol: int
    n_channels: int
    timing_source: int
    is_correct: bool


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot go on."""

    reason: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the process group and end."""


Command = Measure | Stop
Reply = Ready | MeasuredCalls | Failed

_encoder = msgspec.json.Encoder()
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def whole_bytes(message_bytes: int, n_ranks: int) -> int:
    """`message_bytes`, rounded up so that every rank holds whole floats of it."""
    unit = 4 * n_ranks
    return -(-message_bytes // unit) * unit


def to_line(message: Command | Reply) -> bytes:
    """One line, newline included."""
    return _encoder.encode(message) + b"\n"


def command_of(line: bytes) -> Command:
    """The command in `line`; raises msgspec.MsgspecError if it is none."""
    return _commands.decode(line)


def reply_of(line: bytes) -> Reply:
    """The reply in `line`; raises msgspec.MsgspecError if it is none."""
    return _replies.decode(line)
