"""How child processes' log lines look: each behind the name of who wrote it, in a colour of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = ("blue", "magenta", "green", "yellow", "cyan", "red")


class LogLines:
    """Prints log lines to ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours: dict[str, str] = {}

    def show(self, name: str, line: str) -> None:
        """One line, as it is: neither wrapped nor read as markup."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        text = Text.assemble((f"{name} | ", colour), line)
        self._console.print(text, soft_wrap=True, highlight=False)
