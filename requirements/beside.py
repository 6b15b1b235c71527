"""Prints what one lock has and another lacks: `python requirements/beside.py LOWEST DEV`, for `make test-oldest`.

LOWEST has what a user gets, in the lowest versions that pyproject.toml allows; the rest of DEV is what the tests need beside.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PINNED = re.compile(r"^([A-Za-z0-9._-]+)==[^\\#]+")


def pins(lock: str) -> dict[str, str]:
    """The pinned packages of a lock by name, each as a requirement without hashes."""
    found = (PINNED.match(line) for line in Path(lock).read_text().splitlines())
    return {match[1].lower(): match[0].strip() for match in found if match}


if __name__ == "__main__":
    lowest, dev = (pins(lock) for lock in sys.argv[1:])
    print("\n".join(pin for name, pin in dev.items() if name not in lowest))
