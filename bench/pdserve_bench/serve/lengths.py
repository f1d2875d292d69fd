"""Lengths in tokens: fixed, or drawn from a distribution.

512                    always 512
uniform:256-1024       each from 256 to 1,024 alike
lognormal:512,0.6      median 512; the logarithm's standard deviation is 0.6
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_bench.errors import BadOption

if TYPE_CHECKING:
    from random import Random

SYNTAX = "N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA"
_PATTERN = re.compile(
    r"(?P<fixed>\d+)"
    r"|uniform:(?P<low>\d+)-(?P<high>\d+)"
    r"|lognormal:(?P<median>\d+(\.\d+)?),(?P<sigma>\d+(\.\d+)?)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Both ends included. A fixed length has equal ends."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    median: float
    sigma: float

    def draw(self, random: Random) -> int:
        return max(1, round(random.lognormvariate(math.log(self.median), self.sigma)))


Lengths = Uniform | LogNormal


def parse_lengths(text: str, flag: str) -> Lengths:
    """The meaning of ``text``.

    Raises:
        BadOption: it has none.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise BadOption(flag, text, f"{SYNTAX} is expected")
    if match["median"]:
        lengths: Lengths = LogNormal(median=float(match["median"]), sigma=float(match["sigma"]))
        if float(match["median"]) < 1:
            raise BadOption(flag, text, "a median of at least 1 is expected")
        return lengths
    low = int(match["fixed"] or match["low"])
    high = int(match["fixed"] or match["high"])
    if not 1 <= low <= high:
        raise BadOption(flag, text, "at least 1, and the lower end first, is expected")
    return Uniform(low=low, high=high)
