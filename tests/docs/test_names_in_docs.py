"""Whatever the documentation names is there: files, commands with their options, benchmarks, modules, variables."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks.__main__ import programs
from zerotune.tuner.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("CONTRIBUTING.md"), ROOT / "README.md"]
TRACKED = set(
    subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
)  # fmt: skip
FOLDERS = {str(parent) for name in TRACKED for parent in Path(name).parents}
OF_OTHERS = {"train.py", "agent.py", "plugin.c", "init.cc", "net.cc", "nvls.cc", "p2p.cc", "transport/generic.cc"}
"""Files of users and of NCCL that the documentation mentions by name."""
OURS = [ROOT / name for name in TRACKED if re.fullmatch(r"(agent|store|tuner)/.*\.py", name)]
TYPED = get_command(app)
SOURCES = "\n".join(path.read_text() for path in OURS)

pages = pytest.mark.parametrize("page", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in sorted(PAGES)])


@pages
def test_files(page: Path):
    assert [name for name in _file_names(page) if not _is_there(name)] == []


@pages
def test_links(page: Path):
    """mkdocs checks those between pages, with their anchors; here the others, to files, count as well."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith(("http", "mailto"))]
    wrong = []
    for link in links:
        target = (page.parent / link).resolve().relative_to(ROOT)
        if not (ROOT / target).exists():
            wrong.append(link)
    assert wrong == []


@pages
def test_commands(page: Path):
    assert [words for words in _calls(page, "zerotune") if not _is_command(words)] == []


@pages
def test_benchmarks(page: Path):
    known = programs()
    wrong = []
    for words in _calls(page, "python"):
        if words[:2] == ["-m", "benchmarks"] and len(words) > 2:
            name, options = words[2], [word for word in words[3:] if word.startswith("--")]
            source = known[name].read_text() if name in known else ""
            parts = source + "".join(path.read_text() for path in (ROOT / "benchmarks" / "lib").rglob("*.py"))
            if not source or any(option not in parts for option in options):
                wrong.append(words)
    assert wrong == []


@pages
def test_modules_and_variables(page: Path):
    text = page.read_text()
    modules = set(re.findall(r"\bzerotune(?:\.[a-z_]\w*)+", text)) - {"zerotune.service", "zerotune.env"}  # files
    assert [name for name in modules if not _is_module(name)] == []
    variables = set(re.findall(r"\bZEROTUNE_[A-Z_]*[A-Z]\b", text))
    assert [name for name in variables if name not in SOURCES] == []
    targets = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in makefile] == []


def _code(page: Path) -> Iterator[str]:
    """Lines of code blocks, and spans of code in the text."""
    text = page.read_text()
    for block in re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest))


def _file_names(page: Path) -> Iterator[str]:
    for code in _code(page):
        for word in code.split():
            name = word.strip("`'\",;:()").split("::")[0]
            rooms = ("agent/", "store/", "tuner/", "zero_runtime/", "benchmarks/", "tests/", "docs/", "zerotune/")
            if re.fullmatch(r"[\w./-]+", name) and (name.startswith(rooms) or re.search(r"\w\.(py|c|h|cc)$", name)):
                yield name


def _is_there(name: str) -> bool:
    path = name.rstrip("/").removeprefix("zerotune/")
    if path in OF_OTHERS or path in FOLDERS or path.startswith("benchmarks/results"):
        return True
    return any(known == path or known.endswith("/" + path) for known in TRACKED)


def _calls(page: Path, program: str) -> Iterator[list[str]]:
    """The words behind `program` wherever it is called, up to whatever ends the command."""
    for code in _code(page):
        for found in re.finditer(rf"(?:^|[\s/]){program} (.*)", code):
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
    command = TYPED
    rest = list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return rest[0].isupper()  # `zerotune COMMAND --help`
        command = command.commands[rest.pop(0)]
    known = {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "-h", "--install-completion", "--show-completion"}
    return all(word.split("=")[0] in known for word in rest if re.match(r"--?[a-z]", word))


def _is_module(name: str) -> bool:
    parts = name.split(".")[1:]
    if parts[:1] in (["enable"], ["step_ended"], ["training_ended"], ["__version__"]):
        return True
    for n_kept in range(len(parts), 0, -1):
        path = "/".join(parts[:n_kept])
        if path in FOLDERS or {f"{path}.py", f"zerotune/{path}.py"} & TRACKED:
            return n_kept >= len(parts) - 1
    return False
