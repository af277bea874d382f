"""The site builds without a warning, needs nothing from the net, and its generated pages are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from zerotune.tuner.cli.app import app

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # building the site takes half a minute


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_pages_fetch_nothing_from_the_net(site: Path):
    sources = r'<(?:script|img|iframe|source)[^>]* src="?(?:https?:|//)'
    fetching = re.compile(sources + r'|<link[^>]* rel="?(?:stylesheet|preconnect)[^>]*https?:')
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert [page.name for page in pages if fetching.search(page.read_text())] == []


def test_search_works_from_files(site: Path):
    """The index is a script, since a page at file:// may not fetch, and what stands in for a worker is ours."""
    assert "agreement" in (site / "search" / "search_index.js").read_text()
    assert "javascripts/iframe-worker.js" in (site / "index.html").read_text()


def test_every_command_is_there_with_an_example(site: Path):
    page = (site / "reference" / "commands.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    for name, command in _commands(get_command(app)).items():
        assert f"zerotune {name}" in text
        assert re.search(rf"Example:\s+zerotune {name}\b", text), name
        for option in command.params:
            assert all(spelling in text for spelling in option.opts if spelling.startswith("--")), (name, option.name)


def test_every_metric_is_there(site: Path):
    text = (site / "reference" / "metrics.html").read_text()
    names = set(re.findall(r'"(zerotune_\w+)"', (ROOT / "tuner" / "metrics" / "collector.py").read_text()))
    assert names
    assert [name for name in names if name not in text] == []


def _commands(group, prefix="") -> dict:
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= _commands(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = command
    return found
