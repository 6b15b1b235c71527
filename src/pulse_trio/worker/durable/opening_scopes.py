"""How `job.move_on_after` and `job.fail_after` are entered: whether the scope is remembered, and under which key."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NoReturn

from ...errors import UsageError
from ...text import spelled
from .beginning import check_place, number_of, refusal
from .calls import Call
from .changed import check_waits
from .half_undone import check_scope
from .scopes import Scope, innermost
from .unopened import OUTERMOST
from .unremembered import Unremembered

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from ...durable_calls import DurableScope
    from .durable import Durable

_OF_NOTHING = "0:scope"
"""The key of a scope that no attempt remembers: the job was cancelled before it. No key of a handler's looks like it."""


class OpenScope:
    """The block of one `job.move_on_after`, or of one `job.fail_after`, which raises."""

    __slots__ = ("_block", "_durable", "_key", "_seconds", "_what")

    def __init__(self, durable: Durable, seconds: float, key: str | None, *, fail: bool) -> None:
        self._durable = durable
        self._seconds = seconds
        self._key = key
        self._what = "job.fail_after" if fail else "job.move_on_after"
        self._block: AbstractContextManager[DurableScope] | None = None

    def __enter__(self) -> DurableScope:
        self._durable.running.run.check(self._what)
        if self._block is not None:
            raise UsageError(f"This {self._what}(...) was entered before: call {self._what}(...) anew for each `with`.")
        self._block = self._opened()
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._durable.running.run.check(self._what)
        assert self._block is not None  # noqa: S101 -- it was entered
        return self._block.__exit__(kind, error, traceback)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._what}(...) is not the scope yet: write `with {self._what}(...) as scope:` and use scope.{name}."
        )

    async def __aenter__(self) -> NoReturn:
        raise UsageError(f"{self._what}(...) needs `with {self._what}(...) as scope:`, not `async with`.")

    async def __aexit__(self, *_: object) -> None: ...

    def _opened(self) -> AbstractContextManager[DurableScope]:
        durable = self._durable
        check_place(durable, self._what)
        if refusal(durable, self._what) is not None:
            return Unremembered(durable, self._seconds).opened(too_slow=self._too_slow(self._key or _OF_NOTHING))
        if durable.cancelling.comes_before_a_call():
            return Scope(durable, _OF_NOTHING, math.inf).opened(too_slow=self._too_slow(_OF_NOTHING))
        durable.cancelling.clean_up_begins()
        if durable.history.replay.unopened.waits.marks:
            check_scope(durable, self._key, self._what)
        name = durable.keys.next("scope", self._key, self._what, self._number())
        if durable.history.replay.unopened.suspects:
            # Before its own moment is remembered under the number of the wait that it is in the place of.
            call = Call("scope", name)
            call.handles = sys.exception()
            check_waits(durable, call)
        durable.history.what_came_before()
        durable.failures.detour.tell(durable.history)
        if durable.keys.in_main and durable.keys.beyond and name not in durable.history.replay.unopened.within:
            # A worker of 1.0.0rc1 remembered it, which says of no scope what it is in, maybe while the handler unwound: then it
            # is that of another attempt's clean-up.
            durable.history.replay.moments.pop(name, None)
        durable.quiet.opens_scope(name)
        until = durable.moment(name, self._seconds, innermost(durable) or OUTERMOST)
        return Scope(durable, name, until).opened(too_slow=self._too_slow(name))

    def _number(self) -> int | None:
        return number_of(self._durable, Call("scope", ""), self._key)

    def _too_slow(self, key: str) -> str:
        if self._what == "job.move_on_after":
            return ""
        return f"The block of job.fail_after with the key {key!r} was cut short: it had {spelled(self._seconds)}."
