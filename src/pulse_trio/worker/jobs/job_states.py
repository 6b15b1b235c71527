"""The states of a job that a worker holds, and the moves between them, as data; job_table.py has the drawing."""

from __future__ import annotations

from typing import Final, Literal

from ...errors import NotDurable

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


HELD_BACK = frozenset({"user", "parent", "sibling", "deadline"})
"""The reasons of a cancellation that a durable attempt is told of when it has replayed: it undoes what it has done."""


def not_durable(kind: str, job_id: int, runs: str = "trio") -> NotDurable:
    """The error of a durable call in a handler that is not durable."""
    without = "" if runs == "trio" else f" and a handler that runs on Trio, and this one has runs={runs!r}"
    return NotDurable(
        f"{kind!r} is not durable: job.step and the like need @handlers.job(durable=True){without}. "
        f"Deploy that, then: pulse-trio jobs retry {job_id}"
    )


class CleansUpNext(Exception):
    """The handler of a job that is being cancelled has ended by itself before the cancellation reached it, with what this says:
    the job runs once more, and cleans up, as one that was cancelled between two attempts."""

    def __str__(self) -> str:
        return f"{self.args[0]}; the job was cancelled meanwhile, and runs once more to clean up"


class EndsHandler(BaseException):
    """Ends the handler's code. No `Exception`, so that no handler takes it for a failure, and no step for its own."""


class DurableCallRefused(EndsHandler):
    """A durable call while its handler unwinds for a reason after which the next attempt comes to the same place. It ends as
    the cancellation that it came from."""
