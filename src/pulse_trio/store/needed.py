"""The rights that a worker's role needs before its worker starts.

Without this check, a worker of a new version with the rights of the old one would start, and then fail again and again where a
right is missing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import SchemaError, UsageError
from ..grants import FUNCTIONS, HELPERS, TABLES, VIEWS
from .arrays import texts
from .operations import Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .operations import Operation

_NOT_NEEDED = frozenset({*VIEWS.split(", "), "job_archive_default"})
"""The views for people."""
_NOT_OF_THE_WORK = frozenset({
    "upkeep", "ids_behind", "recheck_jobs", "end_overdue", "look_slowly", "stuck_trees", "trees_that_wait",
    "take_metrics_turn", "note_enqueue", "place_event", "send_event", "note_event", *FUNCTIONS["producer"],
})  # fmt: skip
_OF_THE_WORK = tuple(name for name in FUNCTIONS["worker"] if name not in _NOT_OF_THE_WORK)
"""Functions without which a worker's own tasks fail, those of durable jobs included. Its handlers need the rights to enqueue
and to send events; upkeep may be left to other workers."""
_RIGHT = re.compile(r"(\w+)(?: \(([^)]*)\))?(?:, |$)")


def missing_rights() -> Operation[list[str]]:
    """The rights that a worker needs and this role lacks, such as `EXECUTE on wake`: one query on the catalogues."""
    asked = [
        (name, privilege, column)
        for rights, names in TABLES["worker"].items()
        for privilege, columns in _RIGHT.findall(rights)
        for name in names.split(", ")
        if name not in _NOT_NEEDED
        for column in (columns.split(", ") if columns else [None])
    ]
    tables, privileges, columns = zip(*asked, strict=True)
    rows = yield Query(
        "missing_rights",
        {
            "tables": texts(tables),
            "privileges": texts(privileges),
            "columns": texts(columns),
            "functions": texts([*_OF_THE_WORK, *HELPERS]),
        },
    )
    return [row[0] for row in rows]


def refuse_missing(missing: Sequence[str], role: str, schema: str) -> None:
    """Raises `SchemaError` if a worker's role lacks rights (most often it has those of the old version); `UsageError` if it is
    no worker's role at all."""
    if not missing:
        return
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    where = "" if schema == "pulse" else f" --schema {schema}"
    kind, said = (UsageError, "permission denied: ") if "UPDATE on job" in missing else (SchemaError, "")
    raise kind(
        f"{said}the role {role!r} lacks rights that workers of this version need: {', '.join(missing[:4])}{more}. After an "
        f"upgrade rights are granted again: as the schema's owner, run: pulse-trio grants --worker ROLE{where} (here ROLE is "
        f"{role}; name its other work too, as in --operator {role})"
    )
