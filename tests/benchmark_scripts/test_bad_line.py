"""What becomes of bytes on a line that harms them."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.lib.faults.bad_line_worker import HARMS, PASS, BadLine

SENT = bytes(range(100))


async def heard(harm: str) -> tuple[bytes, bytes]:
    """What comes back of SENT while `harm` is on, and what comes within a second after it is off."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    far = await asyncio.start_server(echo, "127.0.0.1", 0)
    line = BadLine(*far.sockets[0].getsockname())
    near = await asyncio.start_server(line.accept, "127.0.0.1", 0)
    line.harm = harm
    async with far, near:
        reader, writer = await asyncio.open_connection(*near.sockets[0].getsockname())
        writer.write(SENT)
        during = await within(reader, 0.3)
        line.harm = PASS
        after = await within(reader, 1.0)
        writer.close()
    return during, after


async def within(reader: asyncio.StreamReader, seconds: float) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(1000), seconds)
    except asyncio.TimeoutError:
        return b""


@pytest.mark.parametrize(
    ("harm", "during", "after"),
    [(PASS, SENT, b""), ("hold", b"", SENT), ("halve", b"", b""), ("drop", b"", b"")],
    ids=["pass", "hold", "halve", "drop"],
)
def test_what_passes_is_held_cut_or_dropped(harm: str, during: bytes, after: bytes) -> None:
    assert asyncio.run(heard(harm)) == (during, after)


def test_what_is_late_or_lost_is_all_or_nothing() -> None:
    for harm in set(HARMS) - {"hold", "halve", "drop"}:
        assert b"".join(asyncio.run(heard(harm))) in (SENT, b"")
