"""The commands that the documentation shows exist, with their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command

from zerotune.tuner.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


def test_documented_commands_exist_with_their_options() -> None:
    wrong = {str(page.relative_to(ROOT)): words for page in PAGES for words in _calls(page) if not _is_command(words)}
    assert wrong == {}


def _code(page: Path) -> Iterator[str]:
    """Lines of code blocks, and spans of code in the text."""
    text = page.read_text()
    for block in re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest))


def _calls(page: Path) -> Iterator[list[str]]:
    """The words behind `zerotune` in each call of it, up to what ends the command."""
    for code in _code(page):
        for found in re.finditer(r"(?:^|[\s/])zerotune (.*)", code):
            words = []
            try:
                parts = shlex.split(found[1], comments=True)
            except ValueError:
                parts = found[1].split()
            for word in parts:
                if word in ("--", "&&", "|", ">", ";", "...", "or"):
                    break
                words.append(word)
            if words and not words[0][:1].isdigit():  # "made by zerotune 0.1.0" in a command's output
                yield words


def _is_command(words: list[str]) -> bool:
    command = get_command(app)
    rest = list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return rest[0].isupper()  # `zerotune COMMAND --help`
        command = command.commands[rest.pop(0)]
    known = {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "-h", "--install-completion", "--show-completion"}
    return all(word.split("=")[0] in known for word in rest if re.match(r"--?[a-z]", word))
