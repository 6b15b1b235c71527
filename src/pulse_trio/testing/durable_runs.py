"""What `run_job` does for a durable handler: children run in place, and waits pass as soon as nothing else can happen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import trio

from ..handlers.models import to_builtins
from ..lines import Kind
from ..states import State
from .jsonb import from_jsonb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import CancelReason
    from .given_resources import GivenResources
    from .memory.one_job import OneClaim
    from .memory.rows import MemoryJob
    from .memory.time_of_tree import JobsTime
    from .memory.tree import MemoryTree


class StepRun(NamedTuple):
    """A step that a durable handler remembers: the name of its function, and what it returned, through JSON; or `error`."""

    name: str
    result: Any = None
    error: str | None = None


class ChildRun(NamedTuple):
    """A child that a durable handler started. `state` is `completed`, `dead`, `cancelled`, or `suspended`."""

    kind: str
    args: dict[str, Any]
    state: State
    result: Any = None
    error: str | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """What a test gives: its resources; and to a durable handler the kinds of children that have results instead of running,
    and events."""

    resources: GivenResources
    stubs: frozenset[str] = frozenset()
    events: Sequence[tuple[str, Any]] = ()


class Resuming:
    """The resumptions of one job."""

    def __init__(self, store: OneClaim, job: MemoryJob, time: JobsTime) -> None:
        self._store = store
        self._tree = store.tree
        self._job = job
        self._time = time
        self.stuck = ""
        """What it waits for that nothing here brings; "" if nothing."""

    async def until_due(self) -> bool:
        """Lets the suspended job go on as soon as it can. Returns False if it cannot, or has ended."""
        tree = self._tree
        while tree.waits is None:
            await tree.changed.wait()
        until = tree.waits.until
        with self._time.waiting(math.inf if until is None else until):
            while not tree.goes_on():
                if self._job.finished is not None:
                    while tree.any_runs:
                        await tree.changed.wait()
                    return False
                if not await self._time.passes(tree):
                    self.stuck = tree.waits_for
                    return False
        self._store.go_on(self._job)
        return True

    async def pass_after(self, seconds: float) -> None:
        """Returns when that time has passed: on Trio's clock, or because durable waits moved the job's time on."""
        tree, time = self._tree, self._time.of_tree
        time.cancel_at = tree.now + seconds
        while tree.now < time.cancel_at:
            changed = tree.changed
            with trio.move_on_after(time.cancel_at - tree.now):
                await changed.wait()
        time.cancel_at = math.inf

    def ends_suspended(self) -> bool:
        """What happens to a worker does not reach a job that is suspended: no worker holds it, and it has no lease. Returns
        whether it is, and stays so."""
        if self._tree.waits is not None:
            self.stuck = self._tree.waits_for
        return self._tree.waits is not None

    def cancel(self, message: str | None, cause: CancelReason) -> None:
        """Cancels the job, for a person or with the cause that a tree has."""
        tree, job = self._tree, self._job
        if job.state is State.RUNNING or (tree.waits is not None and not tree.lines):
            self._store.database.cancel(job.id, message, cause=cause)
            if job.finished is not None:
                job.history.append((job.attempt, job.session, "cancelled"))
                for child in tree.children.values():
                    child.cancel("parent")
        else:
            # As in the database: a durable job that is not running runs once more, if it has a history; children are none.
            job.cancelling, job.wished, job.cause = True, message, cause
        tree.tell()


def steps_of(tree: MemoryTree) -> list[StepRun]:
    """The steps in the history, in order."""
    steps: list[StepRun] = []
    for line in tree.lines:
        if line.kind is Kind.STEP:
            steps.append(StepRun(line.name, msgspec.json.decode(line.value or "null")))
        elif line.kind is Kind.STEP_FAILED:
            steps.append(StepRun(line.name, error=line.value))
    return steps


def children_of(tree: MemoryTree) -> list[ChildRun]:
    """The children, in the order in which they were started."""
    return [
        ChildRun(
            child.request.kind,
            from_jsonb(child.request.args),
            child.state,
            None if child.result is None else from_jsonb(child.result),
            child.error or child.cancel_reason,
            child.new.key,
        )
        for child in tree.children.values()
    ]


def encoded_events(events: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Events as they are stored."""
    return [(name, msgspec.json.encode(payload, enc_hook=to_builtins).decode()) for name, payload in events]
