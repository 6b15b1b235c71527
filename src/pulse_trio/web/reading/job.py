"""One job: its row, its attempts and everything else that happened to it, why it waits, and its tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import UsageError
from ...lines import Kind
from ...plain import json_value
from ...states import FINISHED, TRANSITIONS, Event, State
from ...store import cancelling, family, health, life, operations, why
from ...store.branches import Branch, branches
from ...text import utc_now
from .picture import picture_of

if TYPE_CHECKING:
    from datetime import datetime

    from ...records import JobRecord
    from ...store.cancelling import CancellationRecord
    from ...store.family import TreeJob
    from ...store.health import Quarantined
    from ...store.life import Entry
    from ...store.operations import AttemptRecord, Operation
    from ...store.why import Reason
    from ..database import Database
    from .picture import Picture

    T = TypeVar("T")

MEMBERS = 500
"""Members of a tree on one page."""
LINES = 500
"""Lines of a durable history on one page."""
LONGEST = 2000
"""Characters of a value in it."""
TOO_LONG = f"longer than {LONGEST:,} characters: see pulse-trio jobs show --json"
_RECORDED = {Kind.STEP: "step", Kind.EVENT: "event"}
_NOT_FOR_ALL = {*_RECORDED, Kind.STEP_FAILED}
"""Lines whose values the timeline leaves out: not everybody may read them."""
_STUCK = frozenset({"queue_paused", "kind_paused", "no_worker", "workers_draining", "unknown_kind", "quarantined"})


@dataclass(frozen=True)
class Recorded:
    """What a step of a durable job has returned, or an event has brought. `payload` is that value, or `TOO_LONG`."""

    what: str
    """`step`, `event`, or `event not received`: it was sent, and the job waits for none of that name, or has not come to it."""
    name: str
    at: datetime
    payload: Any


@dataclass(frozen=True)
class Job:
    """Everything that one page shows of a job.

    `timeline` are its events in order, `waits_for` what keeps it, the most decisive first. `tree` has the members of its tree,
    the root first, none for a job without one; `tree_is_cut` says that there are more. `recorded` is what a durable job
    remembers, and was sent. `owes_clean_up`: it was cancelled, and its clean-up did not end.
    """

    job: JobRecord
    attempts: list[AttemptRecord]
    cancellations: list[CancellationRecord]
    quarantine: Quarantined | None
    waits_for: list[Reason]
    timeline: list[Entry]
    recorded: list[Recorded]
    tree: list[TreeJob]
    tree_is_cut: bool
    owes_clean_up: bool
    read_at: datetime

    @property
    def may_cancel(self) -> bool:
        """Whether it has not ended yet."""
        return self.job.state not in FINISHED

    @property
    def may_retry(self) -> bool:
        """Whether it can be made due now."""
        return Event.RETRY in TRANSITIONS[self.job.state]

    @property
    def may_delete(self) -> bool:
        """Whether no worker holds it."""
        return self.job.state is not State.RUNNING

    @property
    def stuck(self) -> bool:
        """Whether it waits for something that a person may have to change."""
        return any(reason.code in _STUCK for reason in self.waits_for)

    @property
    def picture(self) -> Picture:
        """Its events on one axis."""
        return picture_of(self.job, self.timeline, self.read_at)

    @property
    def branches(self) -> list[Branch]:
        """Its tree as lines to draw."""
        return list(branches(self.tree, self.job.id)) if self.tree else []

    @property
    def error(self) -> str | None:
        """The last error, with its traceback."""
        return life.last_error(self.job, self.attempts)[0]


async def read(database: Database, job_id: int) -> Job:
    """One job. Raises `UnknownJob`."""
    job = await database.read(operations.job(job_id))
    attempts = await database.read(operations.attempts(job_id))
    asked = await database.read(cancelling.cancellations(job_id))
    quarantined = None
    if job.state not in FINISHED:
        quarantined = next(iter(await database.read(health.quarantined(job_id))), None)
    waits = [] if job.state in FINISHED else await _allowed(database, why.why(job_id), list[why.Reason]())
    lines, tree, recorded = list[family.HistoryLine](), list[family.TreeJob](), list[Recorded]()
    if job.root_id is not None:
        lines, recorded = await _history(database, job_id)
        tree = await _allowed(database, family.tree(job_id, limit=MEMBERS + 1), tree)
    owing: list[int] = []
    if job.root_id is not None and job.state in FINISHED:
        owing = await _allowed(database, family.unfinished_clean_ups([job_id]), owing)
    return Job(
        job,
        attempts,
        asked,
        quarantined,
        waits,
        life.life_of(job, attempts, asked, lines),
        recorded,
        tree[: MEMBERS + 1] if len(tree) > 1 or lines else [],
        len(tree) > MEMBERS + 1,
        bool(owing),
        utc_now(),
    )


async def _history(database: Database, job_id: int) -> tuple[list[family.HistoryLine], list[Recorded]]:
    """The lines of its history for the timeline, and what it has recorded."""
    told = await _allowed(database, family.history(job_id, longest=LONGEST, limit=LINES), None)
    if told is None:
        return await _allowed(database, family.lines(job_id, limit=LINES), list[family.HistoryLine]()), []
    recorded = [
        Recorded(_RECORDED[Kind(line.kind)], line.name or line.key, line.written_at, _value(line.value))
        for line in told
        if line.kind in _RECORDED
    ]
    sent = await _allowed(database, family.unreceived(job_id, longest=LONGEST, limit=LINES), list[family.SentEvent]())
    recorded += [Recorded("event not received", event.name, event.sent_at, _value(event.payload)) for event in sent]
    return [replace(line, value=None) if line.kind in _NOT_FOR_ALL else line for line in told], recorded


def _value(text: str | None) -> Any:
    if text is None:
        return None
    # What is cut is not shown: the values of fields that `redact` names could not be found in it.
    if len(text) >= LONGEST:
        return TOO_LONG
    return json_value(text)


async def _allowed(database: Database, operation: Operation[T], otherwise: T) -> T:
    """What an operation reads, or `otherwise` for a role that may not: it sees the rest of the job all the same."""
    try:
        return await database.read(operation)
    except UsageError as error:
        if operations.is_refusal(error):
            return otherwise
        raise
