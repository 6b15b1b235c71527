"""What `pulse-trio jobs show` prints of one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..doctor import crashes_of
from ..errors import UsageError
from ..lines import Kind
from ..plain import json_value, plain, to_json
from ..states import FINISHED, State
from ..store import family, operations, why
from ..store.life import due_of
from ..text import local_time, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..client import SyncClient
    from ..records import JobRecord
    from ..store.family import HistoryLine, SentEvent
    from ..store.health import Quarantined
    from ..store.why import Reason

_KINDS = {int(kind): kind.name.lower() for kind in Kind}


def reasons_of(client: SyncClient, job_id: int) -> list[Reason]:
    """What a job waits for; nothing where this role may not ask: it sees the rest of the job all the same."""
    try:
        return client.run(why.why(job_id))
    except UsageError as error:
        if operations.is_refusal(error):
            return []
        raise


def unreceived_of(client: SyncClient, job_id: int, longest: int | None) -> list[SentEvent]:
    """The events that a job has not received; none where this role may not ask."""
    try:
        return client.run(family.unreceived(job_id, longest=longest))
    except UsageError as error:
        if operations.is_refusal(error):
            return []
        raise


def owes_clean_up(client: SyncClient, job: JobRecord) -> bool:
    """Whether a finished job was cut short, and its clean-up did not end; False where this role may not ask."""
    if job.root_id is None or job.state not in FINISHED:
        return False
    try:
        return bool(client.run(family.unfinished_clean_ups([job.id])))
    except UsageError as error:
        if operations.is_refusal(error):
            return False
        raise


def whole(records: Sequence[HistoryLine | SentEvent]) -> list[dict[str, Any]]:
    """Lines and events for a JSON document: their values as JSON, and not as text of it."""
    fields: Any = plain(records)
    for one in fields:
        if "kind" in one:
            one["kind"] = _KINDS.get(one["kind"], f"unknown ({one['kind']})")
        for name in ("value", "payload"):
            if one.get(name) is not None:
                one[name] = json_value(one[name])
    return fields


def compact(value: object) -> str:
    """JSON on one line."""
    return to_json(value, ascii_only=False)


def fields_of(job: JobRecord) -> dict[str, object]:
    times = {name: local_time(getattr(job, name)) for name in _TIMES} | {"run_at": local_time(due_of(job))}
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "queue": job.queue,
        "priority": job.priority,
        "attempt": f"{job.attempt} of {job.max_attempts}",
        "unique key": job.unique_key,
        "key": job.key,
        "tags": " ".join(job.tags) if job.tags else None,
        "metadata": compact(job.meta) if job.meta else None,
        "parent": job.parent_id,
        "tree of": job.root_id if job.root_id != job.id else None,
        "child key": job.child_key,
        "cancelled": job.cancel_reason,
        "progress": _progress(job),
        **{name.replace("_", " ").removesuffix(" at"): value for name, value in times.items()},
        "arguments": compact(job.args),
        "result": compact(job.result) if job.state is State.COMPLETED else None,
    }


def in_quarantine(job: Quarantined) -> str:
    since = f"since {local_time(job.since)}, " if job.since is not None else ""
    return f"{since}after {crashes_of(job)}"


def _progress(job: JobRecord) -> str | None:
    # The end of a completed job says more than a value that is up to a second old.
    if job.progress is None or job.state is State.COMPLETED:
        return None
    return f"{job.progress:.0%} {shown(job.progress_message or '')}".rstrip()


_TIMES = ("created_at", "run_at", "started_at", "lease_until", "finished_at")


def print_error(error: str) -> None:
    for line in shown(error).splitlines():
        click.echo(f"    {line}".rstrip())
