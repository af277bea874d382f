"""Sizes as people write them, in every option that takes bytes."""

from __future__ import annotations

import pytest
from typer.main import get_command

from zerotune.tuner.cli.app import app
from zerotune.tuner.cli.sizes import a_size, megabytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4096", 4096),
        ("1e6", 10**6),
        ("2.5e3", 2500),
        ("16B", 16),
        ("16MB", 16 * 10**6),
        ("16mb", 16 * 10**6),
        ("16MiB", 16 * 2**20),
        ("16 MiB", 16 * 2**20),
        ("16M", 16 * 2**20),
        ("8G", 8 * 2**30),
        ("1.5KiB", 1536),
        (".5k", 512),
        ("1TB", 10**12),
        ("2Gi", 2 * 2**30),
    ],
)
def test_units(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes
    assert parse_bytes(f" {text} ") == n_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "MB", "16Q", "-1", "0", "0.2", "1.5", "1.1KiB", "nan", "inf"),
        *("1e999999999", "1e99", "1_000", "0x10", "1,5MB", "16 M B", "١٦"),
    ],
)
def test_words_that_are_no_size_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="16MiB"):
        parse_bytes(text)


def test_a_plain_number_of_megabytes() -> None:
    assert [megabytes(text) for text in ("25", "0.5", "25MiB", "1000B")] == [25 * 10**6, 500_000, 25 * 2**20, 1000]


def test_every_option_that_takes_bytes_uses_the_parser() -> None:
    taken = {
        f"{name} {option.opts[0]}"
        for name, command in get_command(app).commands.items()
        for option in command.params
        if option.metavar == "SIZE"
    }
    by_name = {
        f"{name} {option.opts[0]}"
        for name, command in get_command(app).commands.items()
        for option in command.params
        if option.opts[0].endswith(("-bytes", "-mb"))
    }
    assert taken == by_name
    assert taken
    assert a_size(4096) == 4096
