"""The states of a job that a worker holds, and the moves between them, as data; job_table.py has the drawing."""

from __future__ import annotations

from typing import Final, Literal

from ...errors import UsageError

JobState = Literal["claimed", "running", "ended", "reported", "lost", "committed"]
CLAIMED: Final = "claimed"
"""Its handler has not started."""
RUNNING: Final = "running"
ENDED: Final = "ended"
"""It has an outcome that is not written yet."""
REPORTED: Final = "reported"
LOST: Final = "lost"
"""This worker has lost it; its handler may still run."""
COMMITTED: Final = "committed"
"""Its own transaction has completed it; its handler may still run."""

MOVES: Final[dict[str, dict[JobState, JobState]]] = {
    "begin": {CLAIMED: RUNNING},
    "end": {CLAIMED: ENDED, RUNNING: ENDED, LOST: LOST},
    "lose": {CLAIMED: LOST, RUNNING: LOST, ENDED: LOST, LOST: LOST},
    "commit": {RUNNING: COMMITTED, LOST: COMMITTED},
    "report": {ENDED: REPORTED, LOST: LOST},
    "leave": {CLAIMED: LOST, RUNNING: LOST, LOST: LOST, COMMITTED: COMMITTED},
}


class NotDurable(UsageError):
    """A durable call in a handler that is not durable. The same code fails in the same way in each attempt: the job is dead."""


class DurableCallRefused(BaseException):
    """A durable call while its handler unwinds for a reason after which the next attempt comes to the same place. It ends as
    the cancellation that it came from. No `Exception`, so that no handler takes it for a failure."""
