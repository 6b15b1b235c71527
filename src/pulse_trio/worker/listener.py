"""Keeps listening for wake-ups and for what concerns running jobs; polling and heartbeats are the net while it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from ..errors import DatabaseUnavailable
from ..observe import DatabaseFound, DatabaseLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..observe import Observer
    from .held import Fence
    from .stacks import StackAsked


class ListenStore(Protocol):
    async def listen(self, on_notify: Callable[[str], None]) -> None: ...


class Listener:
    """`on_notify(queue)` for each wake-up, and with "" whenever it begins to listen (something may have been
    missed); `on_cancel(fence, message)` for each request to cancel a running job, any worker's;
    `on_stack(request)` for each question where one is; `on_deaf()` when it cannot."""

    def __init__(
        self,
        store: ListenStore,
        *,
        on_notify: Callable[[str], None],
        on_cancel: Callable[[Fence, str | None], None],
        on_stack: Callable[[StackAsked], None],
        on_deaf: Callable[[], None],
        backoff: Callable[[int], float],
        observer: Observer,
    ) -> None:
        self._store = store
        self._on_notify = on_notify
        self._on_cancel = on_cancel
        self._on_stack = on_stack
        self._on_deaf = on_deaf
        self._backoff = backoff
        self._observer = observer
        self._failures = 0

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            try:
                await self._store.listen(self._notified)
            except DatabaseUnavailable as error:
                self._on_deaf()
                pause = self._backoff(self._failures)
                self._failures += 1
                if self._failures == 1:
                    self._observer.emit(DatabaseLost("listener", str(error), pause))
                await trio.sleep(pause)

    def _notified(self, payload: str) -> None:
        if self._failures:
            self._failures = 0
            self._observer.emit(DatabaseFound("listener"))
        if " " not in payload:
            self._on_notify(payload)
        elif (request := _request(payload)) is not None:
            self._on_cancel(*request)
        elif (asked := _question(payload)) is not None:
            self._on_stack(asked)


def _request(payload: str) -> tuple[Fence, str | None] | None:
    """`cancel SESSION ID ATTEMPT [REASON]`. No queue's name has a space; what else has one is not for us."""
    word, *rest = payload.split(" ", 4)
    if word != "cancel" or len(rest) < 3:
        return None
    try:
        session, job_id, attempt = map(int, rest[:3])
    except ValueError:
        return None
    return (job_id, attempt, session), rest[3] if len(rest) > 3 else None


def _question(payload: str) -> StackAsked | None:
    """`stack SESSION REQUEST ID`."""
    word, *rest = payload.split(" ")
    if word != "stack" or len(rest) != 3:
        return None
    try:
        session, request, job_id = map(int, rest)
    except ValueError:
        return None
    return session, request, job_id
