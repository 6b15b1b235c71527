"""Tells blocks of their children, writes the children that wait to be written, and lets waiting parents of any worker go on.

A notification `look_for_tree ID` says that something has happened to a child of job ID. If that job runs here, its blocks
look; if not, any worker looks whether it can go on. Each second every worker looks at what is due, which is one probe of an
index that is mostly empty, so a lost notification costs a second.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...errors import DatabaseUnavailable, ReplayMismatch, UsageError
from ..outage import Outage
from ..signal import Signal
from .tree_store import LeaseGone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...jobs import Outcome
    from ...observe import Observer
    from ...store.trees import Cause, Rechecked
    from .block import Block
    from .children import Child
    from .opened import Opened
    from .receiving import Receiver

_EVERY = 1.0
"""Seconds between two looks at what is due."""
_PEEK_EVERY = 5.0
"""Seconds between two looks of a block whose body still runs, where no notification came."""
_GATHER = 0.02
"""Seconds in which children gather that are written together, while their handler does something else."""
_BATCH = 100
_FINISHING = 10.0
"""Seconds for which the end of a burst is put off while looks are left to do."""


class RecheckStore(Protocol):
    async def recheck(self, limit: int = 100) -> Rechecked: ...


class Looks:
    """One for each worker."""

    def __init__(self, store: RecheckStore, receiver: Receiver, observer: Observer) -> None:
        self._store = store
        self._receiver = receiver
        self._outage = Outage("trees", observer)
        self._open: dict[int, list[Opened]] = {}
        self._filled: dict[Block, None] = {}
        self.living: dict[int, Child[Any]] = {}
        """The children of open blocks that are written, by their ids."""
        self._to_look: dict[Opened, None] = {}
        self._due = Signal()
        self._to_write = Signal()
        self._news = Signal()

    # What it is told

    def heard(self, job_id: int) -> None:
        """A notification: something has happened to a child of that job, or it was sent an event."""
        self._receiver.heard(job_id)
        here = self._open.get(job_id)
        if here is None:
            self._due.give()
            return
        for opened in here:
            self._to_look[opened] = None
            opened.block.told()
        self._news.give()

    def struck(self, job_id: int) -> None:
        """A scope of the job has struck, and may have cut bodies of its blocks short."""
        if job_id in self._open:
            self._to_look.update(dict.fromkeys(self._open[job_id]))
            self._news.give()

    def opened(self, opened: Opened) -> None:
        """A block was opened."""
        self._open.setdefault(opened.block.fence.id, []).append(opened)

    def closed(self, opened: Opened) -> None:
        """It has ended."""
        of_job = self._open[opened.block.fence.id]
        of_job.remove(opened)
        if not of_job:
            del self._open[opened.block.fence.id]
        self._to_look.pop(opened, None)
        self._filled.pop(opened.block, None)
        for child in opened.block.by_key.values():
            # A later attempt of the job, which has adopted it, may run here already.
            if child.known_id is not None and self.living.get(child.known_id) is child:
                del self.living[child.known_id]

    def filled(self, block: Block) -> None:
        """The first of several children waits to be written."""
        self._filled[block] = None
        self._to_write.give()

    def live(self, block: Block, children: Iterable[Child[Any]]) -> None:
        """These children of the block are written. Those whose handler is not durable end with an attempt."""
        # A handler that is suspended does not wait for what its block is writing.
        if any(opened.block is block for opened in self._open.get(block.fence.id, ())):
            self.living.update((child.id, child) for child in children if not child.durable)

    def written(self, outcomes: Iterable[Outcome]) -> None:
        """These jobs of this worker have ended, and the database has it. A block whose children were completed here asks for
        none of them: a look and the results of 10,000 took 0.14 of 0.65 s."""
        for outcome in outcomes:
            # An attempt before may have been durable, under older code, and have left children that still live.
            if outcome.kind == "completed" and outcome.claim.attempt == 1:
                child = self.living.pop(outcome.claim.id, None)
                if child is not None:
                    # As the database has it, and every later reader decodes it.
                    child.completed("null" if outcome.result is None else outcome.result)

    # What it does

    async def run(self) -> None:
        """Looks and writes until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._recheck)
            nursery.start_soon(self._write, nursery)
            nursery.start_soon(self._look, nursery)

    async def finish(self) -> None:
        """Lets those go on for whom something has come already. Returns when no look is left to do; after some seconds also if
        one is, because another transaction holds its row."""
        with suppress(DatabaseUnavailable), trio.move_on_after(_FINISHING):
            while (left := await self._store.recheck(0)).due_in is not None:
                await trio.sleep(min(left.due_in, _EVERY))
                await self._store.recheck(_BATCH)

    async def _recheck(self) -> None:
        peek_at = trio.current_time() + _PEEK_EVERY
        while True:
            pause = _EVERY
            for opened in [opened for of_job in self._open.values() for opened in of_job]:
                # Nothing tells of a timeout, or a plain scope of Trio's, that has cut its body short.
                if opened.block.ear.interest or trio.current_time() >= peek_at or opened.cause is not None:
                    self._to_look[opened] = None
                    self._news.give()
            if trio.current_time() >= peek_at:
                peek_at = trio.current_time() + _PEEK_EVERY
            try:
                left = await self._store.recheck(_BATCH)
            except DatabaseUnavailable as error:
                pause = self._outage.failed(error)
            else:
                self._outage.over()
                if left.due_in is not None:
                    pause = min(pause, max(left.due_in, 0.005 if left.left else 0))
            with trio.move_on_after(pause):
                await self._due.wait()

    async def _write(self, nursery: trio.Nursery) -> None:
        while True:
            await self._to_write.wait()
            await trio.sleep(_GATHER)
            filled, self._filled = list(self._filled), {}
            for block in filled:
                nursery.start_soon(_flush, block)

    async def _look(self, nursery: trio.Nursery) -> None:
        while True:
            await self._news.wait()
            while self._to_look:
                opened = next(iter(self._to_look))
                del self._to_look[opened]
                if (cause := opened.cause) is None:
                    await _peek(opened)
                else:
                    nursery.start_soon(_cancel, opened.block, cause)


async def _flush(block: Block) -> None:
    # Its handler hears of a failure when it next uses the block; a lost lease cancels it.
    with suppress(UsageError, ReplayMismatch, LeaseGone):
        await block.flush()


async def _cancel(block: Block, cause: Cause) -> None:
    with suppress(LeaseGone):
        await block.cancel(cause)


async def _peek(opened: Opened) -> None:
    with suppress(UsageError, ReplayMismatch, LeaseGone):
        await opened.peek()
