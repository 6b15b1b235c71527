"""The histories of durable jobs: lines of many jobs in one statement, and what a later attempt begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..lines import Kind, Line, Resumed, unreadable
from ..sql import statement
from .arrays import numbers, optional_numbers, texts
from .rows import ROWS_FAULT, each_alone

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psycopg

    from ..jobs import Claim
    from ..lines import Lines
    from ..postgres import TrioConnection
    from .links import WorkerLink


_KINDS = frozenset(map(int, Kind))


class Written(NamedTuple):
    """What became of lines, by job id and attempt: these are written, these have their row locked for a moment, and these are
    refused, with what the server says. All others have lost their lease."""

    stand: set[tuple[int, int]]
    locked: set[tuple[int, int]]
    refused: Mapping[tuple[int, int], str] = {}


class Histories:
    """Uses a connection of its own: however many steps a worker records, no claim, report or beat waits for them."""

    def __init__(self, link: WorkerLink, schema: str) -> None:
        self._link = link
        self._schema = schema

    async def write_lines(self, lines: Sequence[Lines]) -> Written:
        """Writes lines, at most one `Lines` for each job. Raises `DatabaseUnavailable`: send them again."""
        async with self._link.using() as connection:

            async def write(some: Sequence[Lines]) -> Written:
                return await self._write(connection, some)

            async def alone(one: Lines, error: psycopg.Error) -> Written:
                # Only values that were checked come here, so this is a trigger of the owner's or damaged data.
                said = error.diag.message_primary or str(error)
                return Written(set(), set(), {(one.claim.id, one.claim.attempt): said})

            parts = await each_alone(lines, write, alone)
        return Written(
            {one for part in parts for one in part.stand},
            {one for part in parts for one in part.locked},
            {one: said for part in parts for one, said in part.refused.items()},
        )

    async def _write(self, connection: TrioConnection[Any], some: Sequence[Lines]) -> Written:
        cursor = await connection.execute(statement("write_lines", self._schema), parameters(some), prepare=True)
        rows: list[tuple[int, int, bool]] = await cursor.fetchall()
        return Written(
            {(job_id, attempt) for job_id, attempt, stands in rows if stands},
            {(job_id, attempt) for job_id, attempt, stands in rows if not stands},
        )

    async def resume(self, claim: Claim) -> Resumed | None:
        """What a later attempt begins with; None if it has lost its lease.

        Raises:
            DatabaseUnavailable: ask again.
            ReplayMismatch: the history cannot be read, now or later.
        """
        async with self._link.using() as connection:
            try:
                cursor = await connection.execute(
                    statement("resume", self._schema),
                    {"id": claim.id, "attempt": claim.attempt, "session": claim.session},
                    prepare=True,
                )
                rows: list[Any] = await cursor.fetchall()
            except ROWS_FAULT as error:
                raise unreadable(claim.id, error.diag.message_primary or error) from error
        if not rows:
            return None
        (_, _, _, _, head, _), *lines = rows
        strange = next(((line, kind) for line, kind, *_ in lines if kind not in _KINDS), None)
        if strange is not None:
            raise unreadable(claim.id, f"line {strange[0]} is of kind {strange[1]}, which there is not")
        try:
            found = msgspec.json.decode(head, type=Resumed)
        except msgspec.DecodeError as error:
            raise unreadable(claim.id, f"its row of durable_job is damaged ({error})") from error
        return msgspec.structs.replace(
            found,
            lines=[Line(line, Kind(kind), key, name, value, event) for line, kind, key, name, value, event in lines],
        )

    async def begin_afresh(self, claim: Claim) -> bool:
        """Forgets what the attempts before have done, if the last one has said that it has undone that. Returns whether it had.
        Raises `DatabaseUnavailable`: ask again."""
        return await self._asked("begin_afresh", claim)

    async def comes_after_deadline(self, claim: Claim) -> bool:
        """Records that the job is cancelled, if this attempt has begun after its deadline. Returns whether it has, and nobody
        had. Raises `DatabaseUnavailable`: ask again."""
        return await self._asked("comes_after_deadline", claim)

    async def _asked(self, name: str, claim: Claim) -> bool:
        async with self._link.using() as connection:
            cursor = await connection.execute(
                statement(name, self._schema),
                {"id": claim.id, "attempt": claim.attempt, "session": claim.session},
            )
            [(so,)] = await cursor.fetchall()
        return bool(so)


def parameters(some: Sequence[Lines]) -> dict[str, str]:
    """The parameters of write_lines.sql."""
    every = [(of.claim, of.version, line) for of in some for line in of.lines]
    return {
        "ids": numbers([claim.id for claim, _, _ in every]),
        "attempts": numbers([claim.attempt for claim, _, _ in every]),
        "sessions": numbers([claim.session for claim, _, _ in every]),
        "lines": numbers([line.line for _, _, line in every]),
        "kinds": numbers([int(line.kind) for _, _, line in every]),
        "keys": texts([line.key for _, _, line in every]),
        "names": texts([line.name or None for _, _, line in every]),
        "values": texts([line.value for _, _, line in every]),
        "events": optional_numbers([line.event_id for _, _, line in every]),
        "firsts": numbers([version for _, version, _ in every]),
    }
