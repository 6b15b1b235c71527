"""`crash_points`: a handler runs again and again, killed at its first checkpoint, at its second, and retried to the end."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import trio
import trio.testing

from ...errors import ConfigurationError
from ...handlers import Handler
from ...trio_internals import order_kept
from ..forgotten import keep
from ..memory import MemoryDatabase
from ..own_trio import on_trio
from ..stubs import events_of, with_stubs
from .grounds import SETTINGS, Durably, MemoryGround, open_database
from .lives import NeverEnds, live
from .noting import BodyWatch
from .points import NONE, CrashPoint, point_named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence

    from ...handlers import Handlers
    from .lives import Life
    from .points import Place, Strike

__all__ = ["CrashRun", "CrashRuns", "NeverEnds", "crash_points"]


@dataclass(frozen=True)
class CrashRun:
    """One run of the handler, over: it was struck at one point, and then retried until its job had ended."""

    point: str
    """Which: `none` (no crash), `kill@3` (killed at its third checkpoint), `lost@3` (its lease lost there), `cancel@3` (its job
    cancelled there), `kill@start` (before its first line), `kill@end` (when the attempt had ended, and nothing was
    reported)."""
    place: Place | None
    """The line of the checkpoint: `place.file`, `place.line`, `place.function`."""
    reached: bool
    """Whether the run came to that point. One whose handler takes another way each time may not."""
    job_id: int
    """The job's. Each run has a job of its own."""
    state: str
    """The job's, in the end: `completed`, `dead` or `cancelled`."""
    attempts: int
    result: Any
    error: str | None
    written: list[str]
    """Without a database: the statements that `job.transaction()` has committed."""
    description: str = ""
    """What was done, where, and how to do it again."""

    def __str__(self) -> str:
        return self.description


def crash_points(
    handler: Handler[..., Any],
    /,
    *args: Any,
    arguments: Mapping[str, Any] | None = None,
    only: str | None = None,
    cancel: bool = False,
    dsn: str | None = None,
    handlers: Handlers | None = None,
    children: Mapping[Handler[..., Any] | str, Any] | None = None,
    events: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    timeout: float = 30.0,
) -> CrashRuns:
    """`async for run in crash_points(handler, *args): ...` runs the handler's job again and again, each time to its end: first
    undisturbed, then killed at each of its checkpoints, then losing its lease at each, and killed before its first line and
    after its last. In the body, assert that the effect happened once.

    `arguments` are further arguments by name. `only` runs one point alone, as a failure says. `cancel` adds runs in which a
    person cancels the job at each checkpoint (Trio handlers only): what must be undone then? `dsn` is a PostgreSQL with the
    schema (the fixture `pulse_dsn`), for handlers with `job.transaction()`; without it the jobs are in memory. `handlers` is
    the handler's registry, if it uses resources or middleware. `timeout` is seconds for each attempt. Retries are due at once,
    whatever their delay or the rate of their queue or key.

    A durable handler needs `dsn`. Its children run undisturbed, with `handlers`, or have the results that `children` gives for
    them: by handler or kind a value, an exception, or a function of their arguments. `events` are sent to each of its jobs
    before it begins: payloads by name, or pairs of both. Time passes for it where the database has a clock (`pulse_clock`).

    Works on Trio and asyncio. Raises `InvalidArguments`, `ConfigurationError`; in the loop `NeverEnds` (a `TimeoutError`) for a
    handler that does not end or a job that something keeps waiting, and `ConfigurationError` for a handler that does not come
    to the point of `only`.
    """
    if not isinstance(cast("object", handler), Handler):
        raise ConfigurationError(f"crash_points takes a handler (a function under @handlers.job), got {handler!r}.")
    request = handler.request(*args, **(arguments or {}))
    durable = None
    if handler.durability is None:
        if children is not None or events is not None:
            raise ConfigurationError(
                f"crash_points: children and events are for durable handlers, {handler.kind!r} is none."
            )
    elif dsn is None:
        raise ConfigurationError(
            f"crash_points: {handler.kind!r} is durable, and its history needs a real database: dsn=pulse_dsn, the fixture."
        )
    else:
        durable = Durably(with_stubs(handlers, handler, children), events_of(events))
    point = None if only is None else point_named(only)
    if point is not None and point.strike == "lost" and handler.runs == "process":
        raise ConfigurationError(
            f"crash_points(only={only!r}): the lease of a handler that runs in a process is not lost here, only kill@N."
        )
    strikes: list[Strike] = [] if handler.runs == "process" else ["lost"]
    if cancel or (point is not None and point.strike == "cancel"):
        if handler.runs != "trio":
            raise ConfigurationError(
                f"crash_points(cancel=True) is for handlers on Trio, {handler.kind!r} runs elsewhere."
            )
        strikes.append("cancel")
    points = _points(point, strikes)
    runs = CrashRuns(
        handler, request, points, ground=(dsn, handlers, durable), alone=point is not None, seconds=timeout
    )
    # Not the runs themselves, which end with the loop that is left by a `break`.
    begun = runs.begun
    keep("crash_points(...) was not looped over (async for run in ...)", lambda: not begun.is_set())
    return runs


class CrashRuns:
    """The runs of `crash_points`, one for each step of `async for`."""

    def __init__(
        self,
        handler: Handler[..., Any],
        request: Any,
        points: Generator[CrashPoint, Life],
        *,
        ground: tuple[str | None, Handlers | None, Durably | None],
        alone: bool,
        seconds: float,
    ) -> None:
        self._handler = handler
        self._request = request
        self._dsn, self._handlers, self._durable = ground
        self._seconds = seconds
        self._database = MemoryDatabase()
        self._alone = alone
        self._points = points
        self._last: Life | None = None
        self._watch: BodyWatch | None = None
        self.begun = Event()
        """Set when the first run is asked for."""

    def __aiter__(self) -> AsyncIterator[CrashRun]:
        return self

    async def __anext__(self) -> CrashRun:
        self.begun.set()
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] -- the loop's own
        if self._watch is None:
            self._watch = BodyWatch(caller)
        self._watch.end()
        try:
            point = self._points.send(self._last)  # type: ignore[arg-type] -- None begins it
        except StopIteration:
            self._watch.close()
            raise StopAsyncIteration from None
        try:
            life = self._last = await self._live(point)
        except NeverEnds as error:
            error.add_note(_described(point, None, self._handler))
            raise
        if self._alone and point is not NONE and not life.struck:
            raise ConfigurationError(_not_reached(point, life, self._handler))
        run = CrashRun(
            point=str(point),
            place=life.place,
            reached=life.struck or point is NONE,
            job_id=life.job_id,
            state=life.look.state,
            attempts=life.look.attempt,
            result=life.look.result,
            error=life.look.error,
            written=life.written,
            description=_described(point, life, self._handler),
        )
        self._watch.begin(run.description)
        return run

    def __del__(self) -> None:
        if self._watch is not None:
            self._watch.end()

    async def _live(self, point: CrashPoint) -> Life:
        # A point's number is the same in each run only if the handler's tasks go on in the same order.
        with order_kept():
            return await on_trio(lambda: self._live_on_trio(point), cleanup=SETTINGS["cleanup"])

    async def _live_on_trio(self, point: CrashPoint) -> Life:
        # On a clock that a test moves, seconds say nothing.
        moved = isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
        seconds = float("inf") if moved else self._seconds
        if self._dsn is None:
            ground = MemoryGround(self._database)
            return await live(ground, self._handler, self._handlers, self._request, point, seconds)
        if moved:
            raise ConfigurationError(
                "crash_points(dsn=) talks to PostgreSQL, so it needs real time: no autojump_clock."
            )
        failed: Exception | None = None
        async with open_database(self._dsn, self._durable) as ground:
            try:
                return await live(ground, self._handler, self._handlers, self._request, point, seconds)
            except Exception as error:  # raised below, where no nursery puts it into a group
                failed = error
        raise failed


def _points(only: CrashPoint | None, others: Sequence[Strike]) -> Generator[CrashPoint, Life]:
    """The points in order. What is sent in is how the run at the last point went."""
    if only is not None:
        yield only
        return
    undisturbed = yield NONE
    yield CrashPoint("kill", "start")
    for number in range(1, undisturbed.checkpoints + 1):
        yield CrashPoint("kill", "at", number)
        for strike in others:
            yield CrashPoint(strike, "at", number)
    for number in range(1, undisturbed.ends + 1):
        yield CrashPoint("kill", "end", number)


def _not_reached(point: CrashPoint, life: Life, handler: Handler[..., Any]) -> str:
    checkpoints = "1 checkpoint" if life.checkpoints == 1 else f"{life.checkpoints} checkpoints"
    attempts = "1 attempt" if life.ends == 1 else f"{life.ends} attempts"
    return (
        f'crash_points(only="{point}"): the handler {handler.kind!r} did not come to {point}; '
        f"undisturbed, it had {checkpoints} in {attempts}."
    )


def _described(point: CrashPoint, life: Life | None, handler: Handler[..., Any]) -> str:
    said = point.says(life.place if life is not None else None)
    if life is not None and not life.struck and point is not NONE:
        said = f"did not come to {point}"
    lines = [f"crash_points: the handler {handler.kind!r} {said}"]
    if life is not None:
        attempts = "1 attempt" if life.look.attempt == 1 else f"{life.look.attempt} attempts"
        error = f": {life.look.error.splitlines()[0]}" if life.look.error else ""
        lines.append(f"Its job was {life.look.state} after {attempts}{error}")
    lines.append(f'Again: crash_points({handler.kind}, ..., only="{point}")')
    return "\n".join(lines)
