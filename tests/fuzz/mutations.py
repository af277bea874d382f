"""Inputs made from others by chance, the same for the same seed: for the suite, which has no time for a real fuzzer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def mutations(inputs: Sequence[bytes], dictionary: Sequence[bytes], n: int, max_bytes: int) -> Iterator[bytes]:
    """`n` inputs, each one of `inputs` with 1 to 5 changes: words of the dictionary, parts of others, bytes, cuts."""
    chance = random.Random(n)
    for number in range(n):
        made = bytearray(inputs[number % len(inputs)])
        for _ in range(chance.randint(1, 5)):
            at = chance.randint(0, len(made))
            width = chance.choice((0, 0, 1, 1, 2, 4, 8, 32))
            kind = chance.randrange(4)
            if kind == 0 and dictionary:
                new = chance.choice(dictionary)
            elif kind == 1:
                other = chance.choice(inputs)
                begin = chance.randint(0, len(other))
                new = other[begin : begin + chance.choice((1, 4, 16, 64, 256))]
            else:
                new = chance.randbytes(width) if kind == 2 else bytes([chance.choice((0, 1, 127, 128, 255))]) * width
            made[at : at + width] = new
        yield bytes(made[:max_bytes])
