"""Where the tasks of a handler stand when a cancellation comes, as its line has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...describing import leaves_of
from ...trio_internals import scopes_around
from .beginning import REFUSED
from .calls import IN_STEP
from .scopes import is_struck

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping
    from types import TracebackType

    from .calls import Call
    from .durable import Durable
    from .scopes import Scope


class Awaiting:
    """The current task stands in a durable call while the block is open. A class, because every call opens one: as a generator
    it took 4 us more."""

    __slots__ = ("_call", "_durable", "_outer", "_step", "_task")

    def __init__(self, durable: Durable, call: Call) -> None:
        self._durable = durable
        self._call = call
        self._task = trio.lowlevel.current_task()

    def __enter__(self) -> None:
        durable, task, call = self._durable, self._task, self._call
        self._outer = durable.standing.get(task)
        durable.standing[task] = call
        if self._outer is None:
            durable.quiet.delivering.enters(task)
        durable.quiet.striking.call_stands(task)
        self._step = IN_STEP.get()
        if call.kind == "step":
            IN_STEP.set(call)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        durable, task = self._durable, self._task
        try:
            if error is not None and any(issubclass(type(leaf), trio.Cancelled) for leaf in leaves_of(error)):
                durable.note_cancellation()
        finally:
            IN_STEP.set(self._step)
            durable.cancelling.moves()
            if self._outer is None:
                del durable.standing[task]
                durable.quiet.delivering.leaves(task)
            else:
                durable.standing[task] = self._outer


def keys_of(standing: Mapping[trio.lowlevel.Task, Call], scopes: Iterable[Scope]) -> tuple[str, ...]:
    """The keys of the calls in which tasks stand. A call that the line of a scope has cut short already counts for none: its
    task has only not had its turn since. In the next attempt it may have gone on by then, and never stands there again."""
    struck = {scope.inner for scope in scopes if scope.line is not None}
    return tuple(call.key for task, call in standing.items() if not struck or not is_cut(scopes_around(task), struck))


def may_get_its_line(durable: Durable, call: Call) -> bool:
    """Whether a call that was cancelled in the replay waits for its line all the same. It had it in spite of that
    cancellation: a step in a thread ends, and so does a block whose children have; what was written counts. The handler has
    the result, and is cancelled after it. So it is where the handler cancels a plain nursery in which several calls have their
    lines still to come, or stood when the job was cancelled a moment later: they are cut short where that comes again."""
    reason, replay = durable.running.cancel_reason, durable.history.replay
    struck = reason is None or durable.cancelling.noted or is_struck(durable)
    return struck and reason not in REFUSED and (replay.has_line(call.key) or replay.is_cancelled_at(call.key))


def is_cut_now(task: trio.lowlevel.Task) -> bool:
    """Whether a task that waits for its line has been cancelled since its last turn, so that it waits no longer."""
    own, *around = scopes_around(task)
    return not own.shield and is_cut(around)


def is_behind_a_cut(task: trio.lowlevel.Task) -> bool:
    """Whether something around a task that waits for its line has been cancelled: it had ended in spite of that, or stands in a
    clean-up."""
    return any(scope.cancel_called for scope in scopes_around(task))


def is_cut(scopes: Iterable[trio.CancelScope], struck: Container[trio.CancelScope] | None = None) -> bool:
    """Whether one of these scopes, the innermost first, has struck (is among those), and no clean-up inside of it goes on."""
    for scope in scopes:
        if scope.cancel_called if struck is None else scope in struck:
            return True
        if scope.shield:
            return False
    return False
