"""The checks and declarations that a worker makes in the database before it claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import SchemaError
from ..handlers import hooks_json
from ..migrate import Applied, applied_query, check_versions
from ..sql import statement
from .arrays import texts
from .health import LIFT, row_security
from .limits import limits_parameters
from .links import UPKEEP_PATIENCE, missing_privileges
from .needed import missing_rights, refuse_missing
from .operations import run
from .sessions import despite_conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..handlers import DeathHook, QueueLimits
    from .links import Links
    from .sessions import Sessions


class Startup:
    """The checks and declarations of one worker's start."""

    def __init__(self, links: Links, schema: str, sessions: Sessions) -> None:
        self._links = links
        self._schema = schema
        self._sessions = sessions

    async def check_schema(self) -> None:
        """Raises `SchemaError` unless the schema is one that this version works with, and this role may work with it."""
        async with self._links.claims.using(patience=self._links.start_patience) as connection:
            found = await (
                await connection.execute(
                    "SELECT to_regclass(format('%%I.migration', %s::text)) IS NOT NULL", [self._schema]
                )
            ).fetchone()
            if not found or not found[0]:
                check_versions([], self._schema)
            rows = await (await connection.execute(applied_query(self._schema))).fetchall()
            check_versions([Applied(*row) for row in rows], self._schema)
            missing = await run(connection, self._schema, missing_rights())
            row = await (await connection.execute("SELECT current_user::text")).fetchone()
            hiding = [table for table in await run(connection, self._schema, row_security()) if table.hides]
        refuse_missing(missing, row[0] if row else "", self._schema)
        if hiding:
            # Hidden rows cause no error: jobs would wait for ever, and finished ones be claimed again.
            raise SchemaError(
                f"Row-level security that is not pulse-trio's own may hide rows of {', '.join(map(str, hiding))} in the schema "
                f"{self._schema!r} from this worker. {LIFT}"
            )

    async def declare_limits(self, limits: Sequence[QueueLimits]) -> None:
        """Writes the limits that this worker's code declares for its queues: the newest deploy wins."""
        async with self._links.claims.using(patience=self._links.start_patience) as connection:
            for one in limits:
                await despite_conflicts(connection, statement("limit_queue", self._schema), limits_parameters(one))

    async def declare_deaths(self, hooks: Sequence[DeathHook], others: Sequence[str]) -> None:
        """Writes which job is enqueued when a job of a kind dies; `others` are this worker's kinds without such a hook."""
        parameters = {"session": self._sessions.current, "hooks": hooks_json(list(hooks)), "others": texts(others)}
        with missing_privileges("declare what follows a death"):
            async with self._links.watch.using(patience=UPKEEP_PATIENCE) as connection:
                await despite_conflicts(connection, statement("declare_death_hooks", self._schema), parameters)
