"""Stop strings: a stream of text ends where one of them does.

Owns the text that may still become a stop string. Does not know about tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopStrings:
    """Looks for stop strings in a stream of text.

    The stop string that is complete first ends the stream; where several are complete at the same character, the
    longest of them does. What is emitted depends on the text alone, not on how it was cut into pushes. Text that may be
    the beginning of a stop string is held back until that is decided.

    Args:
        stops: none of them empty (ValueError).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        # Longest first, so that min() below, which keeps the first of equals, finds the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        if "" in self._stops:
            raise ValueError("a stop string is empty")
        self._first_characters = re.compile("|".join(re.escape(c) for c in sorted({stop[0] for stop in self._stops})))
        self._longest = len(self._stops[0]) if self._stops else 0
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be emitted now, and the stop string that ended the stream, if one has.

        After the end every push returns ("", the same stop string).
        """
        if not self._stops:
            return text, None
        if self._stopped is not None:
            return "", self._stopped
        text = self._held + text
        found = [(start + len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, self._stopped = min(found, key=lambda item: item[0])
            self._held = ""
            return text[: end - len(self._stopped)], self._stopped
        cut = self._first_undecided(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The end of the text came first: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_undecided(self, text: str) -> int:
        """Where the longest ending of ``text`` begins that is also the beginning of a stop string."""
        for match in self._first_characters.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[match.start() :]
            if any(stop.startswith(tail) for stop in self._stops):
                return match.start()
        return len(text)
