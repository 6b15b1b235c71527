"""The functions through which the store tells its worker of events during an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..observe import BadRow

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..observe import EnqueueHeldUp, JobDied


class Callbacks(NamedTuple):
    """`on_session` receives each new session before it claims; `on_suspect` the id, kind and crashes of each job that a rescue
    put in quarantine; `on_event` each row that cannot be processed as it stands, each job that is now dead, and each enqueue
    that waits for somebody else's transaction."""

    on_session: Callable[[int], None] | None = None
    on_suspect: Callable[[int, str, int], None] | None = None
    on_event: Callable[[BadRow | JobDied | EnqueueHeldUp], None] | None = None

    def session(self, session: int) -> None:
        """A new session is about to be opened."""
        if self.on_session is not None:
            self.on_session(session)

    def bad_row(self, job_id: int | None, kind: str, during: str, error: str) -> None:
        """A row cannot be processed as it stands."""
        self.event(BadRow(job_id, kind, during, error))

    def suspect(self, job_id: int, kind: str, crashes: int) -> None:
        """A job is in quarantine from now on."""
        if self.on_suspect is not None:
            self.on_suspect(job_id, kind, crashes)

    def event(self, event: BadRow | JobDied | EnqueueHeldUp) -> None:
        """One of these has happened."""
        if self.on_event is not None:
            self.on_event(event)
