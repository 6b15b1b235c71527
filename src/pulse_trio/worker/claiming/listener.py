"""Listens for wake-ups and for notifications about running jobs. While it cannot, polling and heartbeats stand in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

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
TREE = "look_for_tree"
"""`look_for_tree ID`."""


class ListenStore(Protocol):
    async def listen(self, on_notify: Callable[[str], None]) -> None: ...


class QueueNews(Protocol):
    def notified(self, queue: str) -> None:
        """A producer notified that `queue` has a due job; "": notifications arrive from now on."""
        ...

    def deafened(self) -> None:
        """Notifications cannot arrive for now."""
        ...


class CancellationNews(Protocol):
    def heard(self, job_id: int) -> None:
        """The cancellation of a running job was requested; the job may be any worker's."""
        ...

    def missed(self) -> None:
        """Notifications may have been lost until now."""
        ...


class Questions(Protocol):
    def heard(self) -> None:
        """A reason to look: a question where a job is, or a batch that was closed."""
        ...


class TreeNews(Protocol):
    def heard(self, job_id: int) -> None:
        """Something has happened to a child of that job, or to what it waits for; the job may be any worker's."""
        ...


class Told(NamedTuple):
    """Whom notifications of jobs and batches concern."""

    cancellations: CancellationNews
    stacks: Questions
    batches: Questions
    trees: TreeNews


class Listener:
    """Hands each notification to the part that it concerns. It tells `wakeups` when it starts to listen, because notifications
    may have been missed, and when it cannot listen. After an outage it tells those who read requests to running jobs, too;
    batches and trees look by themselves, about once a second.

    Every role that can connect can notify. So each notification is only a hint to look, and an unreadable one is ignored."""

    def __init__(
        self,
        store: ListenStore,
        wakeups: QueueNews,
        told: Told,
        observer: Observer,
    ) -> None:
        self._store = store
        self._wakeups = wakeups
        self._told = told
        self._outage = Outage("listener", observer)

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            try:
                await self._store.listen(self._notified)
            except DatabaseUnavailable as error:
                self._wakeups.deafened()
                await trio.sleep(self._outage.failed(error))

    def _notified(self, payload: str) -> None:
        # Not for every empty payload, which anybody can send: each of these reads the rows of all running jobs.
        if self._outage.over():
            self._told.cancellations.missed()
            self._told.stacks.heard()
        word, _, rest = payload.partition(" ")
        if not rest:
            self._wakeups.notified(payload)
        elif word == CANCEL and (job_id := _id(rest)) is not None:
            self._told.cancellations.heard(job_id)
        elif word == STACK:
            self._told.stacks.heard()
        elif word == TREE and (job_id := _id(rest)) is not None:
            self._told.trees.heard(job_id)
        elif word == BATCH:
            self._told.batches.heard()


def _id(text: str) -> int | None:
    """A job's id as a notification carries it: digits, no more than a bigint has."""
    return int(text) if len(text) < 20 and text.isascii() and text.isdigit() else None
