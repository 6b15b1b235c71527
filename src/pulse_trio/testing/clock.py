"""The clock that a test moves: retries, snoozes, schedules, deadlines and rates of an hour or a month, without waiting.

The jobs are in a real database, on its own clock (virtual_time.py). A worker runs what is due, moves the clock to the next
moment at which something falls due, and so on, in the order of time. Nothing else is simulated.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio.to_thread
import psycopg
import trio

from ..errors import ConfigurationError, DatabaseUnavailable, SchemaError
from ..settings import setting_names
from .draining import UnknownKinds, drain_with, in_trio
from .kept import connected, kept_for
from .kept_worker import KeepingWorker
from .suspended import drained, grows_trees, suspending_at_once
from .virtual_time import MOVE, jump_statement, soon_statement, stop_statement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..handlers import Handlers
    from ..worker import Worker
    from ..worker.building import Parts
    from .suspended import DrainReport


_NO_CLOCK = (
    "This database has no clock that can be moved: make it with pulse_database(clock=True), or put pulse_clock among the "
    "test's arguments (or those of a fixture that it uses)."
)
LAST = datetime(7900, 1, 1, tzinfo=UTC)
"""The last moment that the clock can be moved to. The schema takes a worker's times up to the year 9000 (times_are_possible),
and a lease, a retention or a delay may be a thousand years long."""
_UNITS = ("days", "hours", "minutes", "seconds", "timeout")
_LONGEST = 1e9
"""Seconds, some thirty years: no rate makes a job wait for longer."""
_NOT_AFTER = f"The clock can be moved to {LAST.isoformat()} at the latest"
_LOOK_WHILE_RUNNING = 0.05
"""Seconds after which jobs are claimed although others still run: a durable handler that does something else meanwhile keeps
its slot while it waits for its children."""


@dataclass
class _Goal:
    """How far a worker moves the clock. `by` is a duration from where it stands, or a moment; None: as long as jobs wait for
    their time."""

    by: timedelta | datetime | None
    reached: datetime | None = None
    """Where the clock stands."""
    lacks_clock: bool = False
    """Whether the database has none that can be moved."""


class _Due(NamedTuple):
    """What may be due where the clock stands: jobs always, and these."""

    moved: bool
    """Whether the clock was moved there just now."""
    schedules: bool
    leases: bool
    trees: bool


class PulseClock:
    """The virtual time of one database: PostgreSQL's until it is first moved, and then it moves only when it is told to."""

    def __init__(self, dsn: str, handlers: Handlers) -> None:
        self._dsn = dsn
        self._handlers = handlers
        self._moment: datetime | None = None
        self._goal: _Goal | None = None
        """While it is moved."""

    def now(self) -> datetime:
        """Virtual time, in UTC; in a handler, that at which it is due. Python's own clock is not changed."""
        return (self._goal and self._goal.reached) or self._moment or datetime.now(UTC)

    async def advance(
        self,
        by: timedelta | float = 0.0,
        /,
        *,
        days: float = 0.0,
        hours: float = 0.0,
        minutes: float = 0.0,
        seconds: float = 0.0,
        timeout: float = 30.0,  # noqa: ASYNC109 -- says who did not end
        **settings: Any,
    ) -> DrainReport:
        """Lets so much time pass (`by` is seconds or a `timedelta`): runs what is due, then what falls due in that time, in its
        order, schedules included. Says how many jobs ended how. `advance()` runs what is due now.

        Raises `TimeoutError` when that takes `timeout` seconds of real time, `LookupError` when there is a job of a kind
        without a handler, and `ValueError` for a moment after the year 7899.
        """
        for name in settings.keys() - set(setting_names()):
            if near := difflib.get_close_matches(name, _UNITS, n=1):
                raise ConfigurationError(f"advance() takes no {name!r}. Did you mean {near[0]}?")
        whole = by if isinstance(by, timedelta) else timedelta(seconds=by)
        whole += timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if whole < timedelta():
            raise ValueError(f"Time goes forward only, got {whole}.")
        if whole and whole > LAST - self.now():
            raise ValueError(f"{_NOT_AFTER}: {whole} from {self.now().isoformat()} on.")
        return await self._play(whole, timeout, settings)

    async def advance_to(
        self,
        moment: datetime,
        /,
        *,
        timeout: float = 30.0,  # noqa: ASYNC109 -- says who did not end
        **settings: Any,
    ) -> DrainReport:
        """The same up to a moment, an aware datetime, as in `datetime(2030, 3, 31, 1, 30, tzinfo=ZoneInfo("Asia/Tokyo"))`."""
        self._check(moment)
        return await self._play(moment, timeout, settings)

    async def run_until_idle(
        self,
        *,
        timeout: float = 30.0,  # noqa: ASYNC109 -- says who did not end
        **settings: Any,
    ) -> DrainReport:
        """Runs all jobs to their end: what is due, then whatever job falls due next, until no job waits for its time. Schedules
        fire only where their time has come: they never end. This is what `pulse_worker.drain()` does on this clock."""
        return await self._play(None, timeout, settings)

    async def jump_to(self, moment: datetime, /) -> None:
        """Moves the clock to a moment, an aware datetime, and runs nothing, as if no worker had run until then. In a
        test's first line it chooses the day on which the test begins."""
        await anyio.to_thread.run_sync(self.jump_to_sync, moment)

    def jump_to_sync(self, moment: datetime, /) -> None:
        """`jump_to` for tests without an event loop."""
        self._check(moment)
        with connected(self._dsn) as connection:
            try:
                ((reached,),) = connection.execute(MOVE, {"until": moment}).fetchall()
            except psycopg.errors.UndefinedTable:
                raise ConfigurationError(_NO_CLOCK) from None
        self._moment = cast("datetime", reached).astimezone(UTC)

    def _check(self, moment: datetime) -> None:
        if moment.tzinfo is None:
            raise ValueError(f"The clock takes an aware datetime, got {moment!r}.")
        if moment < self.now() - timedelta(seconds=1):
            raise ValueError(f"Time goes forward only: {moment.isoformat()} is before {self.now().isoformat()}.")
        if moment > LAST:
            raise ValueError(f"{_NOT_AFTER}, got {moment.isoformat()}.")

    def advance_sync(self, by: timedelta | float = 0.0, /, **given: Any) -> DrainReport:
        """`advance` for tests without an event loop."""
        return in_trio(lambda: self.advance(by, **given))

    def advance_to_sync(self, moment: datetime, /, **given: Any) -> DrainReport:
        """`advance_to` for tests without an event loop."""
        return in_trio(lambda: self.advance_to(moment, **given))

    def run_until_idle_sync(self, **given: Any) -> DrainReport:
        """`run_until_idle` for tests without an event loop."""
        return in_trio(lambda: self.run_until_idle(**given))

    async def _play(self, by: timedelta | datetime | None, seconds: float, settings: Mapping[str, Any]) -> DrainReport:
        goal, unknown = _Goal(by), UnknownKinds()
        self._goal = goal

        def worker(**given: Any) -> Worker:
            given["instruments"] = [*given.get("instruments", ()), unknown]
            return ClockWorker(self._handlers, self._dsn, goal=goal, unknown=unknown, **given)

        try:
            report = await drain_with(worker, seconds, settings)
        finally:
            self._moment, self._goal = goal.reached or self._moment, None
        if goal.lacks_clock:
            raise ConfigurationError(_NO_CLOCK)
        unknown.refuse()
        return await drained(self._dsn, self._handlers, report, settings)


class ClockWorker(KeepingWorker):
    """A worker that moves its database's clock instead of waiting."""

    def __init__(self, handlers: Handlers, dsn: str, *, goal: _Goal, unknown: UnknownKinds, **given: Any) -> None:
        # Its own claim loop, scheduler and watchdog do not run: `_play` has their turns.
        super().__init__(suspending_at_once(handlers), dsn, kept=kept_for(dsn), watch=False, **given)
        self._grows_trees = grows_trees(handlers)
        self._goal = goal
        self._moved_at = 0.0
        self._unknown = unknown

    async def _take_in(self, parts: Parts) -> None:
        async with trio.open_nursery() as intake:
            intake.start_soon(self._play, parts)
            await self._stops.hushed.wait()
            intake.cancel_scope.cancel()

    async def _play(self, parts: Parts) -> None:
        parts.reports.stay_behind()
        if self._declarations.schedules:
            await self._store.firing.declare_schedules(self._declarations.schedules)
        try:
            due = await self._begin()
        except SchemaError as error:
            if "pulse_clock" not in str(error):
                raise
            # Raised by the caller, as itself and not in the groups of the worker's nurseries.
            self._goal.lacks_clock = True
            self.stop()
            return
        until = self._until()
        while not self._unknown.kinds:
            found = await self._run_what_is_due(parts, due)
            # What a worker reckons by its own clock (the end of a retry at its job's deadline) has the real time in it that the
            # attempts took: the clock is moved by so much more, and so is the goal.
            taken = timedelta(seconds=trio.current_time() - self._moved_at)
            further = until and until + taken
            row = await self._jump(parts, further, taken, look=found)
            if row is None or row.moved:
                until = further
            if row is None:
                break
            due = row
        if until is not None and not self._unknown.kinds:
            await self._move(MOVE, {"until": until})
        self.stop()

    async def _run_what_is_due(self, parts: Parts, due: _Due) -> bool:
        """Returns whether there may be more: the next jump looks for that, and is cheaper than a claim that finds nothing."""
        if due.schedules:
            await parts.scheduler.fire_due()
        if due.leases:
            await self._store.upkeep.rescue()
        if due.trees:
            # What it ends or wakes is due now: the claim below finds it.
            await self._store.upkeep.tend_trees()
            await self._look_at_trees()
        if not await parts.claim_loop.exhaust():
            # The callback of a batch may be due.
            return await parts.services.batches.finish()
        await self._until_none_runs(parts)
        await parts.reports.drained()
        if self._grows_trees:
            # The last child of a block wakes its parent.
            await self._look_at_trees()
        return True

    async def _until_none_runs(self, parts: Parts) -> None:
        if not self._grows_trees:
            await parts.jobs.until_none_runs()
        while parts.jobs.running:
            with trio.move_on_after(_LOOK_WHILE_RUNNING):
                await parts.jobs.until_none_runs()
            if not parts.jobs.running or await parts.claim_loop.exhaust():
                continue
            # The handler may wait for children that it has cancelled, which run once more.
            if await self._move(soon_statement(self.settings.schema), {}) is not None:
                await parts.claim_loop.exhaust()

    async def _look_at_trees(self) -> None:
        # At all that is due where the clock stands; what is locked becomes due later.
        while (await self._store.trees.recheck()).due_in == 0:
            pass

    async def _begin(self) -> _Due:
        row = await self._move(stop_statement(self.settings.schema), {})
        assert row is not None  # noqa: S101 -- the clock has one row
        # A sign of life that was sent before a move, and answered after it, would turn this worker's estimate back.
        self._store.sessions.set_clock = lambda sent, clock: None
        due = _Due(*row[1:])
        return due._replace(trees=due.trees or self._grows_trees)

    def _until(self) -> datetime | None:
        by = self._goal.by
        return (
            self._goal.reached + by if isinstance(by, timedelta) and self._goal.reached is not None else cast("Any", by)
        )

    async def _jump(self, parts: Parts, until: datetime | None, taken: timedelta, *, look: bool) -> _Due | None:
        soon = parts.claim_loop.limited_in
        given = {
            # A job that is due later than the clock can show waits for ever.
            "until": LAST if until is None else until,
            "taken": taken,
            # At least as much as the clock can show: a rate's part of a microsecond would take for ever.
            "soon": max(0.001, soon) if soon < _LONGEST else None,
            "look": look,
        }
        row = await self._move(jump_statement(self.settings.schema, schedules=self._goal.by is not None), given)
        return None if row is None else _Due(*row[1:])

    async def _move(self, statement: Any, parameters: Mapping[str, Any]) -> Sequence[Any] | None:
        try:
            async with self._store.links.watch.using() as connection:
                rows = await (await connection.execute(statement, parameters, prepare=True)).fetchall()
        except DatabaseUnavailable as error:
            raise RuntimeError(f"The database's clock cannot be moved: {error}") from error
        if not rows:
            return None
        if (reached := cast("datetime", rows[0][0]).astimezone(UTC)) == self._goal.reached:
            return rows[0]
        self._goal.reached = reached
        # Where this worker believes the database's clock to be: for the deadlines of jobs.
        self._moved_at = trio.current_time()
        self._store.sessions.epoch_offset = reached.timestamp() - self._moved_at
        return rows[0]
