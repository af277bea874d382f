"""Hooks of mkdocs: pages that lie outside this folder, and pages that are not written yet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
"""Pages by the file at the top of the repository that they show."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages out of the navigation that are not written yet."""
    config.nav = _written(config.nav)
    return config


def _written(entry: Any) -> Any:
    if isinstance(entry, list):
        return [kept for kept in map(_written, entry) if kept]
    if isinstance(entry, dict):
        return {title: kept for title, kept in ((title, _written(below)) for title, below in entry.items()) if kept}
    return entry if (ROOT / "docs" / entry).is_file() or (ROOT / ELSEWHERE.get(entry, "-")).is_file() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside this folder, where they are there."""
    for page, source in ELSEWHERE.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, content=_as_page((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository become links to their pages where the site has them, else their names."""
    up = "../" * page.file.src_uri.count("/")
    for page_name, source in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{up}{source}", f"]({up}{page_name}")
    return re.sub(r"\[([^]]+)\]\(\.\./\.\./[^)]+\)", r"\1", markdown)


def _as_page(text: str) -> str:
    """Links into docs/ become links of the site; those to other files of the repository become their names."""
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:)(?!#)([^)]+)\)", _only_pages, text)


def _only_pages(found: re.Match[str]) -> str:
    target = ELSEWHERE_BY_SOURCE.get(found[2], found[2])
    inside = (ROOT / "docs" / target.split("#")[0]).exists() or target in ELSEWHERE
    return f"[{found[1]}]({target})" if inside else found[1]


ELSEWHERE_BY_SOURCE = {source: page for page, source in ELSEWHERE.items()}
