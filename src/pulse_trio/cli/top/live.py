"""The live view: one task reads the database, one the keys, one draws, in one nursery."""

from __future__ import annotations

import io
import os
import signal
from typing import TYPE_CHECKING

import psycopg
import trio

from ...client.cancelling import requester
from ...errors import DatabaseUnavailable, PulseTrioError
from ...postgres import open_pool
from ...store import cancelling, operations, queues
from ...store.audit import acting
from ...text import utc_now
from ..faults import describe, our_error
from .drawing import draw
from .reading import look

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.console import Console

    from ...postgres import TrioPool
    from .model import Act, Model
    from .reading import Frame
    from .screen import Screen

CONNECTIONS = 2
"""One to look, and one to act meanwhile."""
ANSWERS = 10.0
"""Seconds after which a database that does not answer counts as lost."""
MOST_JOBS = 200
"""How many jobs are listed, however many lines the terminal has."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP)


_SURVIVED = (PulseTrioError, psycopg.Error, OSError, trio.TooSlowError)
"""What the database and the way to it may fail with: it is shown, and the next look tries again."""


class Live:
    """The view on a terminal, until the person leaves it or a signal ends it."""

    def __init__(
        self, screen: Screen, model: Model, pool: TrioPool, *, schema: str, interval: float, actor: str
    ) -> None:
        self._screen = screen
        self._model = model
        self._pool = pool
        self._schema = schema
        self._interval = interval
        self._actor = actor
        self._console = console()
        self._look_again = trio.Event()
        self._changed = trio.Event()
        self._code = 0

    async def run(self) -> int:
        """Returns the exit code."""
        # The first look is made before the terminal is taken: what prevents it is an error of the command as of any other.
        self._show(await self._look())
        with trio.open_signal_receiver(*SIGNALS) as signals, self._screen.taken():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._heed, signals, nursery.cancel_scope)
                nursery.start_soon(self._watch)
                nursery.start_soon(self._draw)
                await self._obey_keys(nursery)
                nursery.cancel_scope.cancel()
        return self._code

    async def _look(self) -> Frame:
        before = self._model.frame
        limit = min(self._screen.size[1], MOST_JOBS)
        with trio.fail_after(ANSWERS):
            async with self._pool.connection() as connection:
                return await look(connection, self._schema, self._model.chosen, limit, now=utc_now(), before=before)

    def _show(self, frame: Frame) -> None:
        self._model.frame, self._model.lost = frame, None
        self._model.settle()

    async def _watch(self) -> None:
        while True:
            # Made before the look: a key that asks for another one while this goes on is not forgotten.
            self._look_again = trio.Event()
            began = trio.current_time()
            try:
                self._show(await self._look())
            except _SURVIVED as error:
                self._model.lost = reason(error)
            self._changed.set()
            # However slow the database is, most of its time is not for us.
            with trio.move_on_after(max(self._interval, 5 * (trio.current_time() - began))):
                await self._look_again.wait()

    async def _draw(self) -> None:
        while True:
            self._changed = trio.Event()
            await self._screen.draw(draw(self._model, self._console, self._screen.size))
            await self._changed.wait()

    async def _obey_keys(self, nursery: trio.Nursery) -> None:
        while self._model.asks != "to leave":
            try:
                key = await self._screen.key()
            except EOFError:
                return
            act = self._model.press(key)
            if act is not None:
                nursery.start_soon(self._carry_out, act)
            if self._model.asks == "to look":
                self._look_again.set()
            self._changed.set()

    async def _carry_out(self, act: Act) -> None:
        try:
            with trio.fail_after(ANSWERS):
                async with self._pool.connection() as connection:
                    operation = acting(operation_of(act), self._actor)
                    self._model.said = await operations.run(connection, self._schema, operation)
        except _SURVIVED as error:
            self._model.said = reason(error)
        self._look_again.set()
        self._changed.set()

    async def _heed(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for number in signals:
            if number == signal.SIGWINCH:
                self._look_again.set()
            elif number == signal.SIGTSTP:
                self._screen.give_back()
                os.kill(os.getpid(), signal.SIGSTOP)
                self._screen.take()
            else:
                self._code = 128 + number
                scope.cancel()
                return
            self._changed.set()


def operation_of(act: Act) -> operations.Operation[str]:
    """The act, as an operation that returns what became of it."""
    match act.verb:
        case "cancel":
            result = yield from cancelling.cancel(act.job_id, by=requester())
            if result.cancellation is not None and result.state == "running":
                return f"job {act.job_id} is told to stop; it runs until its handler has ended"
            return f"job {act.job_id} is {result.state}"
        case "retry":
            return f"job {act.job_id} is {(yield from operations.retry(act.job_id))}"
        case "pause":
            new = yield from queues.pause(act.queue, kind=act.kind)
            return f"{_name(act)} {'is paused' if new else 'was paused already'}"
        case "resume":
            was = yield from queues.resume(act.queue, kind=act.kind)
            return f"{_name(act)} {'is resumed' if was else 'was not paused'}"


def _name(act: Act) -> str:
    return f"the queue {act.queue}" if act.queue is not None else f"the kind {act.kind}"


def reason(error: Exception) -> str:
    """Why a look or an act failed, for the screen. Raises again what no one expects."""
    if isinstance(error, trio.TooSlowError):
        return f"no answer within {ANSWERS:g} s"
    ours = our_error(error)
    if ours is None:
        raise error
    return describe(ours)


def console() -> Console:
    """Renders frames; in colour unless NO_COLOR is set."""
    from rich.console import Console

    return Console(
        file=io.StringIO(), force_terminal=True, highlight=False, markup=False, emoji=False, legacy_windows=False
    )


async def run_live(screen: Screen, model: Model, dsn: str, *, schema: str, interval: float, actor: str) -> int:
    """The view until it ends; returns the exit code. Raises `DatabaseUnavailable` if the first look fails."""
    try:
        async with open_pool(
            dsn, min_size=1, max_size=CONNECTIONS, timeout=ANSWERS / 2, own=True, autocommit=True
        ) as pool:
            return await Live(screen, model, pool, schema=schema, interval=interval, actor=actor).run()
    except trio.TooSlowError as error:
        raise DatabaseUnavailable(f"The database did not answer within {ANSWERS:g} s.") from error
