"""The children of a block that an earlier attempt had open, in a scope that this attempt was cut short in before it came there.

No block cancels them and waits for them, so the attempt does it by the block's number. The scope's own end cannot wait, because
`with` does not: the next durable call of its task does, and the end of the handler.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from .block import Block
from .failures import goes_on
from .tree_store import LeaseGone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .durable import Durable


class LeftBehind:
    """One such block."""

    collect = True
    closing = True
    unread = False
    all_ended = False
    left_behind = True
    seen = None
    failures: Sequence[object] = ()

    def __init__(self, durable: Durable, number: int) -> None:
        self.number = number
        self._durable = durable
        self._task = trio.lowlevel.current_task()
        self._begun = False
        self._ended = trio.Event()

    def holds(self, _: trio.lowlevel.Task) -> bool:
        """It has no body."""
        return False

    def goes_on_live(self) -> None:
        """The replay is over: the children are cancelled, while the handler goes on."""
        if self._begun:
            return
        self._begun = True
        nursery = self._durable.running.scope_nursery
        if nursery is None:
            # The attempt ends, and what it leaves is the next one's or the database's.
            self._is_over()
        else:
            # What cancels the job ends it: the database cancels them then, or the next attempt comes here again.
            nursery.start_soon(self._close, name="a block that was left behind")

    async def _close(self) -> None:
        try:
            with suppress(LeaseGone):
                await Block(self._durable, self.number, collect=True).close("parent")
        finally:
            self._is_over()

    def _is_over(self) -> None:
        self._durable.blocks.remove(self)
        self._ended.set()

    async def flush(self) -> None:
        """Returns when the children have ended, to the task that goes on after the scope."""
        if trio.lowlevel.current_task() is goes_on(self._task) and self._durable.history.replay.over:
            self.goes_on_live()
            with self._durable.suspension.closes():
                await self._ended.wait()


async def await_left_behind(durable: Durable) -> None:
    """Returns when the children that this task has left behind have ended."""
    for block in [block for block in durable.blocks if block.left_behind]:
        await block.flush()


def leave_behind(durable: Durable, numbers: Iterable[int]) -> None:
    """This attempt opens the blocks with these numbers no more."""
    for number in numbers:
        block = LeftBehind(durable, number)
        durable.blocks.append(block)
        if durable.history.replay.over:
            block.goes_on_live()
