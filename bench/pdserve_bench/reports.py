"""Results as files: JSON, a PNG, or an HTML page that holds pictures and tables by itself."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve_bench.errors import BadOption

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from pdserve_bench.tables import Table

PLOT_SUFFIXES = (".png", ".html")
_DOTS_PER_INCH = 120
_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
img { max-width: 100% }
table { border-collapse: collapse; margin: 1.5rem 0 }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
p.note { color: #666 }
"""


def check_plot_path(path: Path | None) -> None:
    """Before the work is done.

    Raises:
        BadOption: a suffix that is not known.
    """
    if path is not None and path.suffix not in PLOT_SUFFIXES:
        raise BadOption("--plot", path, f"a file ending in {' or '.join(PLOT_SUFFIXES)} is expected")


def write_json(path: Path, result: Any) -> None:
    """``result`` may hold dataclasses."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def write_plot(path: Path, title: str, figure: Figure, tables: Sequence[Table]) -> None:
    """The picture, or by the suffix a page of the picture and the tables."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH)
    if path.suffix == ".html":
        path.write_text(_page(title, picture.getvalue(), tables), encoding="utf-8")
    else:
        path.write_bytes(picture.getvalue())


def _page(title: str, picture: bytes, tables: Sequence[Table]) -> str:
    source = base64.b64encode(picture).decode()
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{_STYLE}</style>\n<h1>{html.escape(title)}</h1>\n"
        f'<img alt="{html.escape(title)}" src="data:image/png;base64,{source}">\n'
        + "".join(_table(table) for table in tables)
        + "</html>\n"
    )


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    note = f'<p class="note">{html.escape(table.note)}</p>\n' if table.note else ""
    rows = "".join(row(cells, "td") for cells in table.rows)
    return f"<table>\n<caption>{html.escape(table.title)}</caption>\n{row(table.columns, 'th')}{rows}</table>\n{note}"
