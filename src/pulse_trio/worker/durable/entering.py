"""The beginning of a `job.durable_nursery()`: its call is named, and its block's number found, when it is entered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import trio

from ...errors import UsageError
from .beginning import begin
from .block import Block
from .keys import HIGHEST, KEYED, block_number
from .opened import Opened
from .scopes import innermost
from .unopened import body_key

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from .durable import Durable
    from .nursery import DurableNursery

_WHAT = "job.durable_nursery"


class _Entering:
    """The awaitable part of opening a block: its call is named and its number found when the block is entered."""

    def __init__(self, durable: Durable, *, collect: bool, key: str | None) -> None:
        self._durable = durable
        self._collect = collect
        self._key = key
        self._opened: Opened | None = None

    async def __aenter__(self) -> DurableNursery:
        self._durable.running.run.check(_WHAT)
        if self._opened is not None:
            raise UsageError(f"This {_WHAT}() is open already: call {_WHAT}() anew for each `async with`.")
        entering, task = self._durable.quiet.cut_blocks.entering, trio.lowlevel.current_task()
        entering.add(task)
        try:
            call = await begin(self._durable, "block", "", self._key, _WHAT)
            number = await _number(self._durable, call.key)
            block = Block(self._durable, number, collect=self._collect)
            await block.seen.load()
        finally:
            entering.discard(task)
        self._opened = Opened(self._durable, call, block)
        return await self._opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._durable.running.run.check(_WHAT)
        assert self._opened is not None  # noqa: S101 -- it was entered
        try:
            return await self._opened.__aexit__(kind, error, traceback)  # noqa: ASYNC102 -- a cancellation is meant to reach it
        finally:
            self._opened = None

    def __enter__(self) -> NoReturn:
        raise UsageError("job.durable_nursery() needs `async with job.durable_nursery() as nursery:`, not `with`.")

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"job.durable_nursery() has no {name!r} yet: `async with job.durable_nursery() as nursery`."
        )


def open_nursery(durable: Durable, *, collect: bool, key: str | None) -> AbstractAsyncContextManager[DurableNursery]:
    """The block of one `job.durable_nursery()`. Raises `UsageError`."""
    if not isinstance(cast("object", collect), bool):
        raise UsageError(f"job.durable_nursery(collect=) is True or False, got {collect!r:.200}.")
    return _Entering(durable, collect=collect, key=key)


async def _number(durable: Durable, key: str) -> int:
    """The block's number in the database, the same in all attempts: that of its call, or one that is remembered for its key.
    In a remembered scope that is remembered as well: its deadline waits for this block in later attempts."""
    history, name = durable.history, f"block {key}"
    resumed = history.replay.resumed
    first = 0 if resumed is None else resumed.first_block
    moments, unwritten = history.replay.moments, False
    given = block_number(key, moments)
    if given is None:
        # A handler's own key may begin so too. Its moment is in seconds since 1970, which is no number of a block.
        known = [int(moment) for key, moment in moments.items() if key.startswith("block ") and moment < HIGHEST]
        given, unwritten = int(history.moment(name, float(max(known, default=KEYED) + 1))), True
    around = innermost(durable)
    if around is not None and body_key(key) not in moments and not history.replay.has_line(key):
        history.moment(body_key(key), 0.0, around)
        unwritten = True
    if unwritten:
        # Children are started before the next line.
        await history.written()
    return first + given
