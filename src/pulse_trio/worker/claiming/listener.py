"""Keeps listening for wake-ups and for what concerns running jobs; polling and heartbeats are the net while it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable
from ..outage import Outage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...observe import Observer

CANCEL = "look_for_cancel"
"""`look_for_cancel ID`. No queue's name has a space."""
STACK = "look_for_stack"
"""`look_for_stack ID`."""
BATCH = "look_for_batch"
"""`look_for_batch ID`."""


class ListenStore(Protocol):
    async def listen(self, on_notify: Callable[[str], None]) -> None: ...


class Listener:
    """Calls, for each notification: `on_notify(queue)` for a wake-up, and with "" whenever it begins to listen (something
    may have been missed); `on_cancel(job_id)` when a running job's cancellation was asked for, any worker's; `on_stack()`
    when there is a question where a job is; `on_batch()` when a batch was closed. `on_deaf()` when it cannot listen.

    Every role that may connect can notify, so each is a hint to look, and one that cannot be read is ignored."""

    def __init__(
        self,
        store: ListenStore,
        *,
        on_notify: Callable[[str], None],
        on_cancel: Callable[[int], None],
        on_stack: Callable[[], None],
        on_batch: Callable[[], None],
        on_deaf: Callable[[], None],
        observer: Observer,
    ) -> None:
        self._store = store
        self._on_notify = on_notify
        self._on_cancel = on_cancel
        self._on_stack = on_stack
        self._on_batch = on_batch
        self._on_deaf = on_deaf
        self._outage = Outage("listener", observer)

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            try:
                await self._store.listen(self._notified)
            except DatabaseUnavailable as error:
                self._on_deaf()
                await trio.sleep(self._outage.failed(error))

    def _notified(self, payload: str) -> None:
        self._outage.over()
        word, _, rest = payload.partition(" ")
        if not rest:
            self._on_notify(payload)
        elif word == CANCEL and (job_id := _id(rest)) is not None:
            self._on_cancel(job_id)
        elif word == STACK:
            self._on_stack()
        elif word == BATCH:
            self._on_batch()


def _id(text: str) -> int | None:
    """A job's id, as it stands in a notification: digits, and no more of them than a bigint has."""
    return int(text) if len(text) < 20 and text.isascii() and text.isdigit() else None
