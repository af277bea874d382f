"""docs/results.md and the README's figures say what benchmarks/results holds, and nothing else is said there."""

from __future__ import annotations

from benchmarks.recording.results import PAGE, README, page, readme


def test_the_page_of_results_is_made_of_the_recorded_files() -> None:
    assert PAGE.read_text() == page()


def test_the_figures_of_the_readme_are_made_of_the_recorded_files() -> None:
    assert README.read_text() == readme()
