# pyright: reportPrivateUsage=false
"""The crash points of a transaction on PostgreSQL: one after each statement, before the completion, and after COMMIT, which is
one message with it; a step's line is a message of its own, so there is one before its COMMIT, too.

How often a statement waits at its socket depends on how fast the server answers, so those waits are no points: a point's number
would be another one in the next run. Between a statement and its answer the database decides, so there is nothing to strike at.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from ...errors import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from ...jobs import Outcome
    from ...lines import Lines
    from .process import Process


_LOCKED_PAUSE = 0.02
"""Seconds until a write is sent again that the database did not take."""


class Passed:
    """A part of the store with points at some of its operations."""

    def __init__(self, part: Any, process: Process) -> None:
        self._part = part
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    async def _point(self, about: str, *, holds_its_row: bool = False) -> None:
        """`holds_its_row`: a transaction has the job's row locked. A person's request waits for that transaction then, and not
        the other way round: the handler goes on."""
        process = self._process
        strikes = process.strikes
        place = process.calls_at()
        if place is None or process.killed:
            return
        strike = strikes.at_call(replace(place, about=about))
        if strike == "kill":
            process.kill()
            await trio.sleep_forever()
        if strike in ("lost", "cancel"):
            strikes.losing.set()
        if strikes.is_being_lost and not (holds_its_row and strikes.point.strike == "cancel"):
            await strikes.told()

    async def _taken(self, write: Callable[[], Awaitable[Any]], is_locked: Callable[[Any], bool]) -> Any:
        """The answer to a write, once the database has taken it. It is repeated here and not by the worker: how often another
        transaction has locked the row (a heartbeat, the watchdog) or the database is away differs from run to run, so the
        repetitions are one point; and the worker would send what its handler does meanwhile together with it."""
        while True:
            try:
                answer = await write()
            except DatabaseUnavailable:
                await trio.sleep(_LOCKED_PAUSE)
                continue
            if not is_locked(answer):
                return answer
            await trio.sleep(_LOCKED_PAUSE)


class Transactions(Passed):
    """`job.transaction()`, and the transaction of a durable step."""

    @asynccontextmanager
    async def begin(self, **given: Any) -> AsyncGenerator[Begun]:
        async with self._quiet_ends(**given) as begun:
            with self._at_statements(begun.connection):
                yield Begun(begun, self._process)
            if begun.completed and not begun.committed:
                await self._point("before its COMMIT", holds_its_row=True)
        await self._point("after its COMMIT")

    @asynccontextmanager
    async def _quiet_ends(self, **given: Any) -> AsyncGenerator[Any]:
        with self._process.quietly():
            async with self._part.begin(**given) as begun:
                with self._process.quietly(quiet=False):
                    yield begun

    @contextmanager
    def _at_statements(self, connection: Any) -> Generator[None]:
        wait, answered = connection.wait, 0

        async def wait_and_strike(*args: Any, **options: Any) -> Any:
            nonlocal answered
            if trio.lowlevel.current_task() in self._process.quiet:
                return await wait(*args, **options)
            with self._process.quietly():
                value = await wait(*args, **options)
            answered += 1
            await self._point(f"after statement {answered} of its transaction")
            return value

        connection.wait = wait_and_strike
        try:
            yield
        finally:
            del connection.wait


class Begun(Passed):
    """A transaction that has begun."""

    async def complete(self, outcome: Outcome) -> bool | None:
        """Writes the completion. How often it finds the row locked (by a heartbeat) differs from run to run: until it is
        written, waits are no points."""
        quiet, task = self._process.quiet, trio.lowlevel.current_task()
        if task not in quiet:
            await self._point("before the completion of its transaction")
        quiet.add(task)
        written = await self._part.complete(outcome)
        if written is not None:
            quiet.discard(task)
        return written

    async def remember(self, lines: Lines) -> bool | None:
        """Writes lines of a history."""
        with self._process.quietly():
            return await self._part.remember(lines)
