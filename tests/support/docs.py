"""Code of the documents, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parents[2] / "docs"


def code_of(document: str) -> dict[str, Any]:
    """The names that the document's one block of Python defines."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (_DOCS / document).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": document}
    exec(compile(code, document, "exec"), names)
    return names
