"""`pulse-trio cron`: list, pause, resume, run, remove, fires."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..store import schedules
from ..text import ago, duration, headline, local_time, utc_now
from .database import READING, open_store
from .options import actor_option, dsn_option, json_option, page_limit_option, schema_option
from .output import notice, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from ..store.schedules import FireRecord, ScheduleRecord

COLUMNS = ("name", "state", "kind", "when", "next", "last", "job", "catch-up", "declared", "problem")
FIRES = ("due", "late", "job", "state")
NAME = click.argument("name", metavar="NAME")


@click.group()
def cron() -> None:
    """List, pause, resume, run and remove schedules."""


@cron.command("list")
@schema_option
@dsn_option
@json_option
def list_schedules(schema: str | None, dsn: str | None, as_json: bool) -> None:
    """List schedules, by name.

    "declared" says how many live workers have the schedule in their code; "by nobody" means that newer code no longer has
    it. Such a schedule still fires until you remove it.
    """
    with open_store(dsn, schema, pins=READING) as client:
        found = client.schedules()
    if as_json:
        print_json(found)
        return
    now = utc_now()
    print_table(COLUMNS, [_row(schedule, now) for schedule in found], right=("job",))
    if not found:
        notice("no schedules")


def _row(schedule: ScheduleRecord, now: datetime) -> tuple[object, ...]:
    return (
        schedule.name,
        schedule.state,
        schedule.kind,
        _when(schedule),
        ago(schedule.next_due, now),
        ago(schedule.last_due, now),
        schedule.last_job,
        schedule.catch_up,
        _declared(schedule),
        headline(schedule.problem),
    )


def _when(schedule: ScheduleRecord) -> str:
    if schedule.every is not None:
        return f"every {duration(schedule.every)}"
    return f"{schedule.cron} {schedule.timezone}"


def _declared(schedule: ScheduleRecord) -> str:
    if not schedule.declared:
        return "at run time"
    workers = schedule.declared_by
    return f"by {workers} worker{'s' * (workers > 1)}" if workers else "by nobody"


@cron.command("pause")
@NAME
@actor_option
@schema_option
@dsn_option
@json_option
def pause_schedule(name: str, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Stop a schedule until it is resumed.

    Occurrences meanwhile are not caught up. A paused schedule stays paused when its worker starts again.
    """
    with open_store(dsn, schema) as client:
        client.pause_schedule(name)
    _say(as_json, {"name": name, "state": "paused"}, f"{name} paused")


@cron.command("resume")
@NAME
@actor_option
@schema_option
@dsn_option
@json_option
def resume_schedule(name: str, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Let a paused or broken schedule go on with its next occurrence."""
    with open_store(dsn, schema) as client:
        next_due = client.resume_schedule(name)
    answer = {"name": name, "state": "active", "next_due": next_due}
    _say(as_json, answer, f"{name} active, next {local_time(next_due) or 'never'}")


@cron.command("run")
@NAME
@actor_option
@schema_option
@dsn_option
@json_option
def run_schedule(name: str, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Enqueue a schedule's job now, and print its id.

    This works for a paused schedule too; its occurrences stay unchanged.
    """
    with open_store(dsn, schema) as client:
        done = client.run_schedule(name)
    if not done.added:
        notice(f"a live job has the schedule's unique key: {done.id}; nothing was added")
    _say(as_json, {"name": name, "id": done.id, "added": done.added}, str(done.id))


@cron.command("remove")
@NAME
@actor_option
@schema_option
@dsn_option
@json_option
def remove_schedule(name: str, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Remove a schedule.

    Its jobs and the record of its fires stay. A worker whose code still declares it creates it again at its next start: pause
    it instead.
    """
    with open_store(dsn, schema) as client:
        declared_by = client.run(schedules.remove(name))
    if declared_by:
        notice(f"{declared_by} live worker(s) declare {name!r} and will create it again at their next start")
    _say(as_json, {"name": name, "removed": True, "declared_by": declared_by}, f"{name} removed")


@cron.command("fires")
@NAME
@page_limit_option()
@schema_option
@dsn_option
@json_option
def list_fires(name: str, limit: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """List the occurrences of a schedule that were fired, latest first, with their jobs."""
    with open_store(dsn, schema, pins=READING) as client:
        found = client.fires(name, limit=limit)
    if as_json:
        print_json(found)
        return
    print_table(FIRES, [_fire(fire) for fire in found], right=("job",))
    if not found:
        notice(f"{name} has not been fired")


def _fire(fire: FireRecord) -> tuple[object, ...]:
    late = duration(max(0.0, (fire.fired_at - fire.due_at).total_seconds()))
    state = fire.job_state or "gone"
    return (local_time(fire.due_at), late, fire.job_id, state if fire.added else f"{state} (enqueued earlier)")


def _say(as_json: bool, answer: Mapping[str, object], line: str) -> None:
    if as_json:
        print_json(answer)
    else:
        click.echo(line)
