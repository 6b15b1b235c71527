"""`pulse-trio queues`: list, pause, resume, drain, limit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ..errors import TookTooLong, UsageError
from ..handlers import QueueLimits, queue_limits
from ..states import State
from ..store import history, watching
from ..store import queues as store
from ..store.refusals import ASK_WHO
from ..text import ago, count_of, duration, utc_now
from .database import READING, open_store
from .options import Number, actor_option, dsn_option, json_option, page_limit_option, schema_option
from .output import notice, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..client import SyncClient
    from ..store.filtering import JobFilter
    from ..store.watching import Depth

COLUMNS = ("queue", "state", "due", "oldest", "scheduled", "running", "longest", "dead", "limit", "rate", "per key")
RIGHT = ("due", "scheduled", "running", "dead", "limit")
LOOK_EVERY = 0.25
SAY_EVERY = 5.0
"""Seconds between a drain's checks, and between its messages while nothing changes."""
LEAST = 2.0
"""Seconds that each look of a drain with a timeout has at least."""
NAMED = 5
"""How many running jobs a drain names."""


@click.group()
def queues() -> None:
    """List, pause, resume, drain and limit queues."""


def _what(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument and option that select a queue or a kind."""
    command = click.option("--kind", metavar="KIND", help="A kind, in all queues, instead of a queue.")(command)
    return click.argument("queue", required=False)(command)


@queues.command("list")
@click.option("--kinds", "kinds", is_flag=True, help="List the paused kinds instead.")
@click.option(
    "--by-key",
    metavar="[QUEUE]",
    is_flag=False,
    flag_value="",
    default=None,
    help="List instead the keys (tenants) with the most due jobs, of one queue or of all.",
)
@page_limit_option("With --by-key: at most this many keys.")
@schema_option
@dsn_option
@json_option
def list_queues(
    kinds: bool, by_key: str | None, limit: int, schema: str | None, dsn: str | None, as_json: bool
) -> None:
    """List queues: how many jobs are due, are scheduled and are running; how long the oldest job has been due and the oldest
    attempt has run; how many jobs died within the last 24 hours.

    Counting ends at a bound, of at most 10,000 due and 10,000 later jobs of a queue and priority: 10,000+ means that there
    may be more.

    A queue is listed while it has live jobs, a pause or a limit, or was served by a worker in the last 7 days.
    """
    if by_key is not None:
        if kinds:
            raise UsageError("Give --kinds or --by-key, not both.")
        _list_keys(by_key or None, limit, schema, dsn, as_json)
        return
    with open_store(dsn, schema, pins=READING) as client:
        paused = client.run(store.paused_kinds())
        depths = None if kinds else client.run(watching.listed())
    found = [] if depths is None else depths.queues
    if as_json:
        print_json(paused if kinds else [q.record for q in found])
        return
    if kinds:
        print_table(("kind", "paused"), [(p.kind, ago(p.paused_at, utc_now())) for p in paused])
    else:
        columns, rows = COLUMNS, [_row(q) for q in found]
        capped = any(q.capped or q.more_dead for q in found)
        if any(q.suspended for q in found):
            at = COLUMNS.index("running")
            columns = (*COLUMNS[:at], "suspended", *COLUMNS[at:])
            rows = [
                (*row[:at], _count(q.suspended, q.more_later), *row[at:]) for row, q in zip(rows, found, strict=True)
            ]
        print_table(columns, rows, right=(*RIGHT, "suspended"), whole=("queue",))
        if not found:
            notice("no queue has jobs")
        if capped:
            notice("a count that ended at its bound has a +: there may be more jobs")
        if depths is not None and depths.cut_short:
            notice("there are more queues than are listed")
    if paused and not kinds:
        notice(f"{count_of(len(paused), 'kind')} paused: {', '.join(p.kind for p in paused)}")
    elif kinds and not paused:
        notice("no kind is paused")


def _list_keys(queue: str | None, limit: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    with open_store(dsn, schema, pins=READING) as client:
        found = client.queue_keys(queue, limit=limit)
    if as_json:
        print_json(found)
        return
    rows = [(k.queue, k.key, k.waiting, _age(k.oldest_available_age), k.running) for k in found]
    print_table(("queue", "key", "due", "oldest", "running"), rows, right=("due", "running"), whole=("queue",))
    if len(found) == limit:
        notice(f"there may be more keys, with fewer jobs: --limit {limit * 2}")
    elif not found:
        notice(f"no job {'' if queue is None else f'of the queue {queue} '}has a key")


def _count(jobs: int, more: bool) -> str:
    return f"{jobs:,}+" if more else str(jobs)


def _row(q: Depth) -> tuple[object, ...]:
    per_key = ", ".join(str(each) for each in (q.key_limit, q.key_rate) if each is not None)
    return (
        q.name,
        "paused" if q.paused else "",
        _count(q.available, q.more_due),
        _age(q.oldest),
        _count(q.scheduled, q.more_later),
        _count(q.running, q.more_due and not q.available),
        _age(q.longest),
        _count(q.dead, q.more_dead),
        q.limit,
        q.rate,
        per_key,
    )


def _age(seconds: float | None) -> str:
    return "" if seconds is None else duration(round(seconds, 1))


@queues.command("pause")
@_what
@actor_option
@click.option(
    "--all", "every", is_flag=True, help="Every listed queue instead; a queue that is new later is not paused."
)
@schema_option
@dsn_option
def pause_queue(queue: str | None, kind: str | None, every: bool, schema: str | None, dsn: str | None) -> None:
    """Stop claiming from a queue, or jobs of one kind, until it is resumed. Running jobs go on."""
    with open_store(dsn, schema) as client:
        if every:
            _refuse_both(queue, kind)
            known = [q.name for q in client.queues()]
            paused = sum(client.pause(name) for name in known)
            notice(f"{count_of(len(known), 'queue')} paused, {len(known) - paused:,} of them before")
            return
        unknown = None if queue is None else client.run(watching.unknown(queue))
        new = client.pause(queue, kind=kind)
    notice(f"{_name(queue, kind)} {'is paused' if new else 'was paused already'}")
    if unknown is not None:
        notice(unknown)


@queues.command("resume")
@_what
@actor_option
@click.option("--all", "every", is_flag=True, help="Every paused queue instead.")
@schema_option
@dsn_option
def resume_queue(queue: str | None, kind: str | None, every: bool, schema: str | None, dsn: str | None) -> None:
    """Resume claiming from a queue, or jobs of one kind."""
    with open_store(dsn, schema) as client:
        if every:
            _refuse_both(queue, kind)
            resumed = sum(client.resume(q.name) for q in client.queues() if q.paused)
            notice(f"{count_of(resumed, 'queue')} resumed")
            return
        was = client.resume(queue, kind=kind)
    notice(f"{_name(queue, kind)} {'is resumed' if was else 'was not paused'}")


def _refuse_both(queue: str | None, kind: str | None) -> None:
    if queue is not None or kind is not None:
        raise UsageError("Give --all, or one queue, or --kind: not two of them.")


@queues.command("drain")
@_what
@click.option(
    "--timeout",
    type=Number(0, 10**9),
    metavar="SECONDS",
    help="Stop waiting after this time, with exit code 1; the queue stays paused.  [default: wait]",
)
@actor_option
@schema_option
@dsn_option
def drain_queue(queue: str | None, kind: str | None, timeout: float | None, schema: str | None, dsn: str | None) -> int:
    """Pause a queue, or one kind, and wait until none of its jobs is running. It stays paused."""
    with open_store(dsn, schema) as client:
        client.pause(queue, kind=kind)
        left = _wait_until_empty(client, queue, kind, timeout)
    if left is None:
        notice(f"{_name(queue, kind)} is paused, and none of its jobs is running")
        return 0
    notice(left)
    return 1


def _wait_until_empty(client: SyncClient, queue: str | None, kind: str | None, timeout: float | None) -> str | None:
    """Returns None when nothing runs, or what there is to say after the timeout."""
    began = time.monotonic()
    # Until then a worker that does not know of the pause yet may claim once more.
    in_effect = began + store.IN_EFFECT["queue" if kind is None else "kind"]
    said, said_at = -1, began
    while True:
        now = time.monotonic()
        until = None if timeout is None else max(began + timeout, now + LEAST)
        over = timeout is not None and now >= began + timeout
        named = ""
        try:
            running = client.run(store.running(queue, kind=kind), until=until)
            says = over or running != said or now >= said_at + SAY_EVERY
            if running and says:
                named = _named(client, queue, kind, running, until)
        except TookTooLong as error:
            if until is None or time.monotonic() < until:
                raise
            raise TookTooLong(
                f"After {duration(timeout or 0.0)} the database had not answered how many jobs of {_name(queue, kind)} run; "
                f"it stays paused. {ASK_WHO}"
            ) from error
        if not running and now >= in_effect:
            return None
        if over:
            still = f"{count_of(running, 'job')} of {_name(queue, kind)} still ran{named}"
            unknown = f"no job of {_name(queue, kind)} ran, but a worker may not know of the pause yet"
            return f"after {duration(timeout or 0.0)} {still if running else unknown}; it stays paused"
        if says:
            notice(f"{_name(queue, kind)}: {count_of(running, 'job')} running{named}")
            said, said_at = running, now
        time.sleep(LOOK_EVERY)


def _named(client: SyncClient, queue: str | None, kind: str | None, running: int, until: float | None) -> str:
    """Some of the jobs that run, to be said behind their number."""
    chosen: JobFilter = {"state": State.RUNNING, "queue": queue, "kind": kind}
    found = client.run(history.jobs(chosen, limit=NAMED, timeout=None), until=until)
    names = ", ".join(f"{job.id} ({job.kind})" for job in found)
    if running > NAMED:
        names += f" and {running - NAMED:,} more"
    return f": {names}" if found else ""


def _name(queue: str | None, kind: str | None) -> str:
    return f"queue {queue}" if kind is None else f"kind {kind}"


@queues.command("limit")
@click.argument("queue")
@click.option("--limit", metavar="NUMBER|none", help="Jobs that may run at once, across all workers.")
@click.option("--rate", metavar="RATE|none", help="Jobs that may start in a period, as 10/s, 100/m or 1000/h.")
@click.option("--key-limit", metavar="NUMBER|none", help="The same for each key whose jobs say nothing themselves.")
@click.option("--key-rate", metavar="RATE|none", help="The same for each key whose jobs say nothing themselves.")
@actor_option
@schema_option
@dsn_option
@json_option
def limit_queue(queue: str, schema: str | None, dsn: str | None, as_json: bool, **given: str | None) -> None:
    """Limit a queue. Options that are not given stay unchanged; `none` removes a limit."""
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise UsageError("Say what to limit: --limit, --rate, --key-limit or --key-rate.")
    chosen = queue_limits(queue, **{name: _read(name, value) for name, value in changes.items()})
    with open_store(dsn, schema) as client:
        limits = client.run(store.limits_of(queue))._replace(**{name: getattr(chosen, name) for name in changes})
        client.run(store.limit(limits))
        now = next((q.record for q in client.run(watching.listed()).queues if q.name == queue), None)
    if as_json:
        print_json(now)
    else:
        notice(f"queue {queue}: {_described(limits)}")


def _read(name: str, value: str) -> Any:
    if value == "none":
        return None
    if name in ("limit", "key_limit"):
        try:
            return int(value)
        except ValueError:
            raise UsageError(f"--{name.replace('_', '-')} is a whole number, or none, not {value!r}.") from None
    return value


def _described(limits: QueueLimits) -> str:
    parts = [
        f"at most {limits.limit} at once" if limits.limit else "",
        f"{limits.rate.starts} in {duration(limits.rate.seconds)}" if limits.rate else "",
        f"at most {limits.key_limit} at once for each key" if limits.key_limit else "",
        f"{limits.key_rate.starts} in {duration(limits.key_rate.seconds)} for each key" if limits.key_rate else "",
    ]
    return "; ".join(filter(None, parts)) or "no limits"
