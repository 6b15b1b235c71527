"""`runs="asyncio"`: an unchanged asyncio function, on an asyncio event loop inside Trio's (trio-asyncio).

One loop serves all the asyncio jobs of a worker. It opens with the first of them, in the worker's services, and closes
when the last job's report has been written. A cancellation of the job cancels the handler's asyncio task, once, as asyncio
does; the call ends when the handler has ended.

asyncio lets a task outlive the one that made it. Here none outlives its job: each task is known by the context it was made
in, and what is left when the handler has ended is cancelled and waited for, and told in an event.

Known flaws: trio-asyncio replaces functions of the asyncio module when it is imported, at the worker's start. A module
that did `from asyncio import get_running_loop` before keeps the original, which knows no loop. A handler must not stop the
loop it shares. Whoever makes a task from a callback of another job's context (a pool's own) makes it that job's task.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

import trio

from ...errors import ConfigurationError
from ...jobs import Job
from ...observe import TasksLeftBehind
from ..stack import await_frames, frames_text
from .outside import OutsideTrio

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from ...observe import Observer
    from ..held import Held


class _Made:
    """The asyncio tasks that were made in a job."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.tasks: set[asyncio.Task[Any]] = set()


_made_in_job: ContextVar[_Made | None] = ContextVar("pulse_trio_made_in_job", default=None)


class AsyncioCalls:
    """The calls of a worker's asyncio handlers. `run` keeps their loop; `cleanup` in seconds.

    Raises `ConfigurationError` when trio-asyncio is not installed.
    """

    def __init__(self, *, cleanup: float, observer: Observer) -> None:
        try:
            # Here and not at the first job, because importing it takes a while and changes asyncio.
            import trio_asyncio  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise ConfigurationError(
                f"Handlers with runs='asyncio' need trio-asyncio: pip install 'pulse-trio[asyncio]' ({error})."
            ) from None
        self._open_loop: Any = trio_asyncio.open_loop  # pyright: ignore[reportUnknownMemberType]
        self._cleanup = cleanup
        self._observer = observer
        self._wanted = trio.Event()
        self._opened = trio.Event()
        self._made: dict[Held, _Made] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Keeps the loop that the first call asks for, until cancelled."""
        await self._wanted.wait()
        async with self._open_loop() as loop:
            loop.set_task_factory(_make_task)
            # The default would end the worker for what a callback raised, whoever's it was.
            loop.set_exception_handler(_log)
            self._loop = loop
            self._opened.set()
            await trio.sleep_forever()

    def call_of(self, call: Callable[[Job, str], Coroutine[Any, Any, Any]]) -> Callable[[Held, str], Awaitable[Any]]:
        """The call of an asyncio function."""

        async def in_asyncio(held: Held, args: str) -> Any:
            self._wanted.set()
            await self._opened.wait()
            job = Job(held.claim, OutsideTrio(held, "asyncio"))

            async def handler() -> Any:
                # Called here, where asyncio's loop runs: a function may do more than return its coroutine.
                return await call(job, args)

            assert self._loop is not None  # noqa: S101 -- opened
            return await self._in_loop(self._loop, held, handler())

        return in_asyncio

    async def _in_loop(self, loop: asyncio.AbstractEventLoop, held: Held, handler: Coroutine[Any, Any, Any]) -> Any:
        self._made[held] = made = _Made(held)
        context = copy_context()
        context.run(_made_in_job.set, made)
        main = loop.create_task(handler, context=context)
        try:
            return await _result_of(main, held)
        finally:
            # Again and again: what is ended may start something at its end.
            while left := [task for task in made.tasks if task is not main and not task.done()]:
                await self._end(held, left)  # noqa: ASYNC102 -- shielded inside
            del self._made[held]

    def stack_of(self, held: Held) -> str | None:
        """The asyncio tasks of a job with the frames they wait in; None if it has none."""
        if (made := self._made.get(held)) is None:
            return None
        tasks = sorted(made.tasks, key=lambda task: task.get_name())
        return "\n".join(f"asyncio task {t.get_name()}\n{frames_text(await_frames(t.get_coro()))}" for t in tasks)

    async def _end(self, held: Held, left: list[asyncio.Task[Any]]) -> None:
        """Cancels the tasks that a handler left behind and waits for them, however long: they belong to the job."""
        claim = held.claim
        self._observer.emit(TasksLeftBehind(claim.id, claim.kind, tuple(task.get_name() for task in left)))
        with trio.CancelScope(shield=True):
            for task in left:
                task.cancel()
            for task in left:
                await _done(task)


class Exited(Exception):
    """What a SystemExit or KeyboardInterrupt in an asyncio task becomes: as they are, asyncio lets them end the loop."""


class _Tamed(Coroutine[Any, Any, Any]):
    """A coroutine that does not raise SystemExit or KeyboardInterrupt."""

    def __init__(self, coro: Any, held: Held | None) -> None:
        self._coro = coro
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # cr_frame and the like: for stacks

    def send(self, value: Any) -> Any:
        return _tame(self._coro.send, value, self._held)

    def throw(self, *error: Any) -> Any:
        return _tame(lambda e: self._coro.throw(*e), error, self._held)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Any:
        raise TypeError("only a task awaits this")


def _tame(step: Callable[[Any], Any], value: Any, held: Held | None) -> Any:
    # `held` is here to be found on the stack: see LagMonitor.
    try:
        return step(value)
    except (SystemExit, KeyboardInterrupt) as error:
        raise Exited(repr(error)) from error


def _make_task(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **given: Any) -> asyncio.Task[Any]:
    import asyncio

    context = given.get("context")
    made = context.get(_made_in_job) if context is not None else _made_in_job.get()
    task: asyncio.Task[Any] = asyncio.Task(_Tamed(coro, made.held if made is not None else None), loop=loop, **given)
    if made is not None:
        made.tasks.add(task)
        task.add_done_callback(made.tasks.discard)
    return task


def _log(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # asyncio.BaseEventLoop's own, which logs; TrioEventLoop's also ends the loop.
    import asyncio

    asyncio.BaseEventLoop.default_exception_handler(loop, context)  # type: ignore[arg-type]


async def _result_of(task: asyncio.Task[Any], held: Held) -> Any:
    """What the handler returned or raised. Our cancellation goes in as asyncio's, and comes out as Trio's."""
    import asyncio

    here = trio.lowlevel.current_task()
    cancelled: Callable[[], Any] | None = None

    def wake(_: object) -> None:
        trio.lowlevel.reschedule(here)

    def abort(raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
        nonlocal cancelled
        cancelled = raise_cancel
        task.cancel(held.take_cancellation())
        return trio.lowlevel.Abort.FAILED

    task.add_done_callback(wake)
    await trio.lowlevel.wait_task_rescheduled(abort)
    try:
        return task.result()
    except Exited as error:
        raise error.__cause__ or error from None
    except asyncio.CancelledError:  # noqa: ASYNC103 -- translated for Trio
        if cancelled is None:
            # Nobody cancelled the job: what the handler raised is its own failure.
            raise
        cancelled()


async def _done(task: asyncio.Task[Any]) -> None:
    """Waits for a task's end, whatever it is."""
    event = trio.Event()
    task.add_done_callback(lambda _: event.set())
    await event.wait()
    if not task.cancelled():
        task.exception()  # or asyncio would say that nobody looked
