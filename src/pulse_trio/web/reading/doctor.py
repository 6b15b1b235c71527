"""What the doctor finds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...doctor import Finding, diagnose, judge_failure, judge_line, judge_server
from ...errors import PulseTrioError
from ...store import health, operations

if TYPE_CHECKING:
    from ..site import Site

PATIENCE = 5.0
AGE = 15.0
"""Seconds for which one examination serves all pages: it reads more than the others."""
LEVELS = {"error": 0, "warning": 1, "ok": 2}


@dataclass(frozen=True)
class Doctor:
    """The findings, the worst first."""

    ok: bool
    findings: list[Finding]

    @property
    def wrong(self) -> list[Finding]:
        """Errors and warnings."""
        return [f for f in self.findings if f.level != "ok"]

    @property
    def right(self) -> list[Finding]:
        """What is in order."""
        return [f for f in self.findings if f.level == "ok"]


async def read(site: Site) -> Doctor:
    """Examines the database, or returns what was found a moment ago."""
    return await site.live.recent("doctor", AGE, lambda: _examine(site))


async def _examine(site: Site) -> Doctor:
    database = site.database
    async with database.reading(patience=PATIENCE) as connection:
        asked = time.time()
        server = await operations.run(connection, database.schema, health.server())
        took = time.time() - asked
        findings = [Finding("ok", "connection", f"as {server.role}")]
        findings += judge_line(database.dsn)
        findings += judge_server(server, difference=server.clock - asked - took / 2, unsure=took / 2)
    try:
        async with database.reading(patience=PATIENCE) as connection:
            findings += diagnose(await operations.run(connection, database.schema, health.health(server)))
    except PulseTrioError as error:
        async with database.reading(patience=PATIENCE) as connection:
            lockers = await operations.run(connection, database.schema, health.lockers())
        findings.append(judge_failure(error, str(error), lockers))
    findings.sort(key=lambda f: LEVELS[f.level])
    return Doctor(not any(f.level == "error" for f in findings), findings)
