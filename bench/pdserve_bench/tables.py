"""A table as a value, and how it looks in a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

import rich.table


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells. The first column is left-aligned, the others right-aligned.

    Attributes:
        note: a line below it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""


def for_terminal(table: Table) -> rich.table.Table:
    shown = rich.table.Table(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many digits that count; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
