# pyright: reportPrivateUsage=false
"""The crash points of durable calls: before and after each statement by which one is remembered.

A step's function has returned, and its line is not written; the line is written, and the handler does not know. In between the
database decides, so there is nothing else to strike at. What a durable call does beside, as waiting for a notification, differs
from run to run and is no point; nor is a repetition of a statement that the database did not take.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from ...lines import CALL_OF, Kind
from ...worker import durable as durable_package
from .points import is_users
from .transactions import Passed, Transactions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

    from ...lines import Line, Lines
    from ...store.trees import Fence, NewChild, Started
    from ...store.waits import Received, Wanted
    from ...worker import Worker
    from .process import Process

_DURABLE = os.path.join(os.path.dirname(durable_package.__file__), "")


def stands_in_a_call(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Whether a durable call itself waits there, and not a function of the user's that it has called."""
    inside = False
    for frame, _ in frames:
        if frame.f_code.co_filename.startswith(_DURABLE):
            inside = True
        elif is_users(frame):
            inside = False
    return inside


def add_points(worker: Worker, process: Process) -> None:
    """Puts the points of durable calls and transactions into a worker that has not begun."""
    worker._store = cast("Any", _Store(worker._store, process))


class _Store(Passed):
    def __init__(self, store: Any, process: Process) -> None:
        super().__init__(store, process)
        self.histories = _Histories(store.histories, process)
        self.trees = _Trees(store.trees, process)
        self.receipts = _Waits(store.receipts, process)
        self.transactions = Transactions(store.transactions, process)


class _Histories(Passed):
    async def write_lines(self, lines: Sequence[Lines]) -> Any:
        all_of_them = [line for some in lines for line in some.lines]
        # Marks are written with the line that they belong to.
        told = [line for line in all_of_them if not _is_mark(line)] or all_of_them
        what = ", ".join(dict.fromkeys(map(_named, told)))
        await self._point(f"before {what} was written")
        written = await self._taken(lambda: self._part.write_lines(lines), lambda answer: bool(answer.locked))
        await self._point(f"after {what} was written")
        return written


class _Trees(Passed):
    def __init__(self, part: Any, process: Process) -> None:
        super().__init__(part, process)
        self._refused: tuple[int, str] | None = None
        """What was refused because the job is being cancelled: it is asked for again until the handler has heard of that."""

    async def start_children(self, fence: Fence, block: int, children: Sequence[NewChild]) -> Started:
        what = "1 child of it was" if len(children) == 1 else f"{len(children)} children of it were"
        asked = block, children[0].key
        if asked != self._refused:
            await self._point(f"before {what} written")
        started = await self._taken(
            lambda: self._part.start_children(fence, block, children), lambda answer: answer.refused == "locked"
        )
        if started.refused == "cancelling":
            self._refused = asked
            return started
        await self._point(f"after {what} written")
        return started


class _Waits(Passed):
    async def receive(self, wanted: Sequence[Wanted]) -> Mapping[tuple[int, int], Received]:
        found = await self._part.receive(wanted)
        # Without a payload its job's row is locked, and the question is repeated, or its lease is lost.
        names = [one.name for one in wanted if _is_there(found.get((one.claim.id, one.line)))]
        if names:
            await self._point(f"after the event {names[0]!r} was received")
        return found


def _is_there(received: Received | None) -> bool:
    return received is not None and received.payload is not None


def _is_mark(line: Line) -> bool:
    return line.kind is Kind.MOMENT and line.key.startswith("0:")


def _named(line: Line) -> str:
    match line.kind:
        case Kind.STEP | Kind.STEP_FAILED:
            return f"the line of step {line.name}"
        case Kind.MOMENT if _is_mark(line):
            return "a mark of its history"
        case Kind.MOMENT:
            return "the moment until which it waits"
        case Kind.CANCELLED:
            return "the line of the cancellation"
        case Kind.TIMED_OUT:
            return f"the timeout of the event {line.name!r}"
        case _:
            return f"the line of the {CALL_OF[line.kind]}"
