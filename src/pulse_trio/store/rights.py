"""Which role a refused statement needs, and who can grant it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..grants import FUNCTIONS, HELPERS, TABLES

if TYPE_CHECKING:
    from ..grants import RoleKind

# A worker's last: it reads every argument, which is more than a person or a program should have.
_ORDER: tuple[RoleKind, ...] = ("producer", "operator", "waiter", "worker")
_REFUSED = re.compile(r'permission denied for (?:table|view|function|sequence|schema) "?(\w+)"?')


def remedy(refusal: str, schema: str) -> str:
    """What to do about PostgreSQL's `permission denied for view jobs`; empty if no role of ours has that right."""
    found = _REFUSED.search(refusal)
    if found is None:
        return ""
    name = found[1]
    if name in HELPERS:
        return (
            " Every role of the schema needs that, and it was taken from all: as the schema's owner, grant one of its roles "
            "its rights again, as in: pulse-trio grants --worker ROLE"
        )
    touching: list[RoleKind] = [
        kind for kind in _ORDER if name == schema or name in FUNCTIONS[kind] or name in _named(kind)
    ]
    if not touching:
        return ""
    ways = [f"--{kind} ROLE" for kind in touching]
    # Which of them the role has already no refusal says: a waiter reads a column of the table, and no more.
    other = ", the one that it does not have yet" if len(ways) > 1 else ""
    return (
        f" That needs the rights of {_either(touching)}: as the schema's owner, run: pulse-trio grants {' or '.join(ways)}"
        f"{other} (and name what else the role does: it keeps no other rights)"
    )


def _named(kind: RoleKind) -> list[str]:
    return [name for names in TABLES[kind].values() for name in names.split(", ")]


def _either(kinds: list[RoleKind]) -> str:
    return " or ".join(f"{'an' if kind == 'operator' else 'a'} {kind}" for kind in kinds)
