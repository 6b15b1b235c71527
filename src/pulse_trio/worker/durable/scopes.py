"""`job.move_on_after` and `job.fail_after`: deadlines that later attempts keep.

The deadline is remembered when the block begins. That it struck is a line, with the calls that stood then: a later attempt is
cancelled while the same calls stand. That a block ended in time is remembered with the next durable call: its deadline may pass
before the next attempt, whose replay may end inside the block.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from ...lines import Kind
from .replay import Stood

if TYPE_CHECKING:
    from collections.abc import Generator

    from .durable import Durable


class Scope:
    """One remembered deadline. `until` is in seconds since 1970, by the database's clock."""

    def __init__(self, durable: Durable, key: str, until: float) -> None:
        self.key = key
        self._durable = durable
        self.until = until
        self.inner = trio.CancelScope()
        self._noted = False
        self._ended = ended_key(key)
        if self._ended in durable.history.replay.moments:
            self.until = math.inf
        if durable.deadlines_count:
            self.goes_on_live()

    @property
    def cancelled_caught(self) -> bool:
        """Whether the block was cut short by this scope; known when the block has ended."""
        return self.inner.cancelled_caught

    @property
    def cancel_called(self) -> bool:
        """Whether its deadline has struck, or `cancel` was called."""
        return self.inner.cancel_called

    def cancel(self) -> None:
        """Cancels the block now."""
        self.inner.cancel()
        self._durable.note_cancellation()

    def goes_on_live(self) -> None:
        """The attempt has come to where the one before was: from now on the deadline counts."""
        self.inner.deadline = self._durable.on_our_clock(self.until)

    def note(self, at: tuple[str, ...]) -> None:
        """Remembers that it struck, if it did, while these calls stood."""
        if self.inner.cancel_called and not self._noted:
            self._noted = True
            value = msgspec.json.encode(Stood(at)).decode()
            self._durable.history.hold(Kind.SCOPE_CANCELLED, self.key, "", value)

    def strike_again(self) -> None:
        """The history has come to where it struck."""
        self._noted = True
        self.inner.cancel(reason="an earlier attempt was cut short here")

    def _ends_in_time(self) -> None:
        """Remembers it before a later call does anything that rests on it."""
        history = self._durable.history
        if self.until < math.inf and history.replay.over:
            history.replay.moments[self._ended] = 0.0
            history.hold(Kind.MOMENT, self._ended, "", "0.0")

    @contextmanager
    def opened(self, *, fail: bool) -> Generator[Scope]:
        """The block."""
        with self.inner:
            self._durable.scopes.append(self)
            self._durable.history.replay.scopes.add(self.key)
            self._durable.hand_out()
            try:
                yield self
            finally:
                # What cut a plain await short is remembered here.
                if self.inner.cancel_called:
                    self._durable.note_cancellation()
                else:
                    self._ends_in_time()
                self.inner.deadline = math.inf
                self._durable.scopes.remove(self)
                self._durable.history.replay.scopes.discard(self.key)
        if fail and self.inner.cancelled_caught:
            raise trio.TooSlowError


def ended_key(key: str) -> str:
    """Under which it is remembered that the scope `key` ended in time."""
    return f"{key} ended"


@contextmanager
def open_scope(durable: Durable, seconds: float, key: str | None, *, fail: bool) -> Generator[Scope]:
    """The block of one `job.move_on_after` or `job.fail_after`."""
    name = durable.keys.next("scope", key, "job.fail_after" if fail else "job.move_on_after")
    with Scope(durable, name, durable.moment(name, seconds)).opened(fail=fail) as scope:
        yield scope
