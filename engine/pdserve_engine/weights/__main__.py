"""``python -m pdserve_engine.weights MODEL``: converts a model now, so that no node has to at its start."""

from __future__ import annotations

import sys

from pdserve_engine.weights import resolve_model
from pdserve_engine.weights.errors import WeightsError


def main() -> int:
    """Prints the folder that a node would load."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(resolve_model(sys.argv[1]))
    except WeightsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
