"""A finding of the doctor, and how it belongs to the alerts of deploy/prometheus/alerts.yaml and to their runbook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from ..text import count_of

RUNBOOK: Final = "https://github.com/pulse-trio/pulse-trio/tree/main/docs/how-to/runbook.md"
"""The page with an entry for each alert, below the project's Documentation address (pyproject.toml)."""

BACKLOG: Final = 300.0
"""Seconds that a job may be due before it is reported."""
FAILING: Final = 0.5
"""The share of a kind's attempts that may fail."""
ENOUGH_ATTEMPTS: Final = 10
"""How many attempts of a kind that share needs to be meaningful."""
RESCUED: Final = 5
"""Attempts of dead workers within a quarter of an hour that are not reported."""
FULL: Final = 0.95
"""The share of all slots that may be taken while jobs wait..."""
WAITED: Final = 60.0
"""... for longer than so many seconds."""
UNSERVED: Final = 10.0
"""Seconds for which a job may be due in a queue that no running worker serves: in a deploy there may be none for a moment."""
LATE: Final = 120.0
"""Seconds that a schedule may be late."""

JUDGED: Final[dict[str, tuple[float, ...]]] = {
    "PulseNoWorkers": (),
    "PulseDatabaseDown": (),
    "PulseQueueBacklog": (BACKLOG,),
    "PulseJobsFail": (FAILING, ENOUGH_ATTEMPTS),
    "PulseJobsRescued": (RESCUED,),
    "PulseQuarantine": (0,),
    "PulseSlotsFull": (FULL, WAITED),
    "PulseScheduleLate": (LATE,),
}
"""The alerts that the database alone can tell, with the thresholds of their expressions, in their order."""
ONLY_METRICS: Final[dict[str, str]] = {
    "PulseLeasesLost": "a worker that loses a lease may write nothing about it",
    "PulseLoopBlocked": "only the process knows how late its event loop is",
    "PulseHeartbeatsSlow": "only the worker measures its statements",
    "PulseReportsPending": "what could not be written is in the worker's memory",
}
"""The other alerts, and why the doctor cannot know what they tell."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. An error keeps jobs from running, or may lose them; a warning makes them slow or late.

    `alert` is the Prometheus alert that fires for the same cause when it lasts, and `runbook` the address of its entry.
    """

    level: Literal["ok", "warning", "error"]
    check: str
    what: str
    do: str | None = None
    alert: str | None = None
    runbook: str | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runbook", None if self.alert is None else f"{RUNBOOK}#{self.alert.lower()}")


def at_least(jobs: int, more: bool) -> str:
    """A number of jobs, which may have been counted up to a bound."""
    return f"at least {count_of(jobs, 'job')}" if more else count_of(jobs, "job")
