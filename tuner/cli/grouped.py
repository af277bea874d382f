"""How help lists commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Grouped(TyperGroup):
    """Help lists commands by purpose, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the lists."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            words = (command.help or "").strip().partition("\n\n")[0]
            panel = str(getattr(command, "rich_help_panel", None) or "Commands")
            panels.setdefault(panel, []).append((name, " ".join(words.split())))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)
