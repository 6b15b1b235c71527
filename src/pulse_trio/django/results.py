"""A job as Django's `TaskResult`."""

# pyright: basic
# Django has no types.

from __future__ import annotations

import builtins
import re
import sys
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..states import State
from .library import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY, TaskError, TaskResult, TaskResultStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..records import JobRecord
    from ..store.operations import AttemptRecord

_STATUSES = {
    State.RUNNING: TaskResultStatus.RUNNING,
    State.COMPLETED: TaskResultStatus.SUCCESSFUL,
    State.DEAD: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
}
"""All other states: READY."""
_WENT_WELL = ("completed", "released", "snoozed")


class JobError(TaskError):
    """An error of an attempt. Its class is looked up among what is imported already: Django's own `TaskError` imports the
    module that is named, and here the name comes from a row."""

    __slots__ = ()

    @property
    def exception_class(self) -> type[BaseException]:
        """The exception's class. Raises `ImportError` where its module is not imported, `ValueError` if it is no exception."""
        module, _, name = self.exception_class_path.rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        if found is None:
            raise ImportError(f"{self.exception_class_path!r} is nothing that this process has imported.")
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            raise ValueError(f"{self.exception_class_path!r} does not reference a valid exception.")
        return found


def result_of(task: Any, record: JobRecord, attempts: Sequence[AttemptRecord], alias: str) -> Any:
    """What Django's callers see of a job."""
    began = [attempt.started_at for attempt in attempts if attempt.started_at is not None]
    last = record.started_at or max(began, default=None)
    # The running attempt is among them.
    result = TaskResult(
        task=task_of_row(task, record.args, record.queue, record.priority, alias),
        id=str(record.id),
        status=_STATUSES.get(record.state, TaskResultStatus.READY),
        enqueued_at=record.created_at,
        started_at=min(began, default=last),
        finished_at=record.finished_at,
        last_attempted_at=last,
        args=list(record.args["args"]),
        kwargs=dict(record.args["kwargs"]),
        backend=alias,
        errors=_errors(record, attempts),
        worker_ids=[str(attempt.worker) for attempt in attempts],
    )
    if record.state is State.COMPLETED:
        object.__setattr__(result, "_return_value", record.result)
    return result


def has_arguments_of_a_task(args: object) -> bool:
    """Whether a job's arguments are those that an enqueue of a task writes."""
    return isinstance(args, dict) and isinstance(args.get("args"), list) and isinstance(args.get("kwargs"), dict)


def task_of_row(task: Any, args: Mapping[str, Any], queue: str, priority: int, alias: str) -> Any:
    """The task as it was enqueued. Its fields are set without Django's checks: the settings may have changed since."""
    changed = {
        "queue_name": queue,
        "priority": min(max(priority, TASK_MIN_PRIORITY), TASK_MAX_PRIORITY),
        "run_after": _moment(args.get("run_after")),
        "backend": alias,
    }
    made = object.__new__(type(task))
    for each in fields(task):
        object.__setattr__(made, each.name, changed.get(each.name, getattr(task, each.name)))
    return made


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _errors(record: JobRecord, attempts: Sequence[AttemptRecord]) -> list[Any]:
    # What a cancelled attempt has for an error is the reason of its cancellation.
    texts = [each.error for each in attempts if each.error and each.outcome not in (*_WENT_WELL, "cancelled")]
    if record.state is State.DEAD and record.error and record.error not in texts:
        texts.append(record.error)  # it died between two attempts
    if record.state is State.CANCELLED:
        texts.append(f"JobCancelled: {record.cancel_reason or 'it was cancelled'}")
    return [error_of(text) for text in texts]


def error_of(text: str) -> Any:
    """A job's error text as a `TaskError`."""
    headline, _, trace = text.partition("\n\n")
    return JobError(
        exception_class_path=_path_of(headline.partition(":")[0].strip(), trace),
        traceback=f"{trace or text}\n",
    )


def _path_of(name: str, trace: str) -> str:
    """`module.Class`. The first line of an error text has the bare name, the traceback the whole path."""
    named = re.findall(rf"^((?:\w+\.)+{re.escape(name)})(?::|$)", trace, re.MULTILINE) if name.isidentifier() else []
    if named:
        return named[-1]
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        return f"builtins.{name}"
    return "pulse_trio.errors.JobCancelled" if name == "JobCancelled" else "pulse_trio.errors.JobFailed"
