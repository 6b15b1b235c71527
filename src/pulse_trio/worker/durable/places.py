"""Where in a handler's code a plain await was cut short, and whether a task is there again.

No line says how far code has come since its last durable call. A clean-up that makes a durable call tells it: the exception
that it handles has left a frame of its task at a certain line. Lines count from the first of their function, so that a change
of other code moves no place.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...describing import leaves_of
from ...trio_internals import coroutine_of, runs_tasks, tasks_from
from ..diagnosis.stack import await_frames

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator
    from types import FrameType

_DEEPEST, _LONGEST = 30, 200
"""Frames of a place, and letters of a function's name. A place with more is none."""
_NOT_THE_HANDLERS = ("pulse_trio.", "trio.", "outcome.")
_CALLS = ("pulse_trio.worker.durable.keys", "pulse_trio.worker.durable.entering")
"""Where every durable call passes; and the end of a block, which waits for its children."""


def place_of_the_cut() -> tuple[str, ...] | None:
    """The functions of the current task and their lines, the outermost first, to that which the cancellation that is handled
    now has left an await of. Empty: that is not known. None: it has left a durable call."""
    came_from = list(_to_the_cancellation(sys.exception()))
    if came_from and any(_is_of_a_call(frame) for leaf in leaves_of(came_from[-1]) for frame, _ in _left_by(leaf)):
        return None
    # What plain code of a clean-up has raised meanwhile has left the same function at another line.
    by_all = [of_frame for error in came_from for of_frame in _left_by(error)]
    left = dict(by_all)
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] -- a coroutine that runs says nothing
    while frame is not None and not runs_tasks(frame.f_globals.get("__name__")):
        frames.append(frame)
        frame = frame.f_back
    # The last that it has left: those further in have ended, and what cleans up has begun since.
    inner = next((one for one, _ in reversed(by_all) if one in frames), None)
    if inner is None:
        return ()
    outer = frames[frames.index(inner) + 1 :]
    return _place([*((one, one.f_lineno) for one in reversed(outer)), (inner, left[inner])])


def _to_the_cancellation(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and each that was handled when it was raised, to the one in which a `Cancelled` is. If there is none: the
    exception alone."""
    found, seen = list[BaseException](), set[int]()
    while error is not None and id(error) not in seen:
        found.append(error)
        if any(issubclass(type(leaf), trio.Cancelled) for leaf in leaves_of(error)):
            return iter(found)
        seen.add(id(error))
        error = error.__context__
    return iter(found[:1])


def _left_by(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that an exception has left, and their lines, the outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _is_of_a_call(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _CALLS


def _place(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, ...]:
    place = tuple(_lines(frames))
    return place if len(place) <= _DEEPEST and all(len(one) <= _LONGEST for one in place) else ()


def _lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    for frame, line in frames:
        if not _is_ours(frame):
            code = frame.f_code
            yield f"{code.co_qualname}:{line - code.co_firstlineno}"


def _is_ours(frame: FrameType) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith(_NOT_THE_HANDLERS)


class Told(Protocol):
    """What a watch tells."""

    def reached(self) -> None:
        """A task awaits something there."""
        ...


class Watch(trio.abc.Instrument):
    """Tells when a task below `root`, which is none of `standing`, awaits something at a place. Trio calls it for each step of
    each task, so it exists only while a cancellation is to come again."""

    def __init__(
        self, root: trio.lowlevel.Task, standing: Container[trio.lowlevel.Task], place: tuple[str, ...], told: Told
    ) -> None:
        self._root = root
        self._standing = standing
        self._place = place
        self._told = told
        trio.lowlevel.add_instrument(self)

    def is_there(self) -> bool:
        """Whether a task is there now."""
        return any(task not in self._standing and self._stands(task) for task in tasks_from(self._root))

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task not in self._standing and self._is_below(task) and self._stands(task):
            self._told.reached()

    def _stands(self, task: trio.lowlevel.Task) -> bool:
        frames: Any = await_frames(coroutine_of(task))
        # What is awaited there may go on for many frames.
        return tuple(islice(_lines(frames), len(self._place))) == self._place

    def _is_below(self, task: trio.lowlevel.Task | None) -> bool:
        while task is not None and task is not self._root:
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return task is not None

    def ends(self) -> None:
        """It watches no more."""
        with suppress(KeyError):
            trio.lowlevel.remove_instrument(self)
