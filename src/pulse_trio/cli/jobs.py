"""`pulse-trio jobs`: list, show, retry, delete."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from ..errors import TookTooLong, UsageError
from ..plain import plain
from ..states import FINISHED, State
from ..store import family, health, history, life, operations
from ..text import ago, count_of, duration, headline, utc_now
from . import timeline
from .database import open_store
from .filters import RATE, described, filter_of, filter_options, parsed_retention
from .options import Number, WholeNumber, actor_option, dsn_option, json_option, page_limit_option, schema_option
from .output import notice, print_fields, print_json, print_rich, print_table
from .rehearsing import rehearse_deletion, rehearse_retry
from .roots import anew, on_trees, said_of_anew, said_of_members, said_of_unfinished, settled_roots, unfinished
from .showing import compact, fields_of, in_quarantine, owes_clean_up, print_error, reasons_of, unreceived_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from ..client import SyncClient
    from ..records import JobRecord
    from ..store.history import Deleted, JobFilter, Retried

JOB_ID = WholeNumber(1, 2**63 - 1)
COLUMNS = ("id", "state", "queue", "kind", "attempt", "when", "arguments", "error")
SHORT = 60
"""Characters of the arguments in a list."""
VALUE = 5_000
"""Characters of a step's value or an event's payload that are read for a line of the timeline."""
REASONS = 20
"""How many refusals are reported one by one."""


@click.group()
def jobs() -> None:
    """List, show, retry and delete jobs."""


@jobs.command("list")
@filter_options
@click.option("--before", type=JOB_ID, metavar="ID", help="Only jobs with a lower id: the next page.")
@page_limit_option()
@click.option(
    "--timeout",
    type=Number(0.001, 86400),
    default=history.PATIENCE,
    metavar="SECONDS",
    show_default=True,
    help="The query's time limit in the database.",
)
@schema_option
@dsn_option
@json_option
def list_jobs(
    limit: int, before: int | None, timeout: float, schema: str | None, dsn: str | None, as_json: bool, **given: Any
) -> None:
    """List jobs, newest first."""
    chosen = filter_of(given)
    with open_store(dsn, schema) as client:
        try:
            if as_json:
                print_json(client.jobs(limit=limit, before=before, timeout=timeout, **chosen))
                return
            pages = client.run(history.pages_of(chosen, limit=limit, before=before, timeout=timeout))
            # A line shows little of a large argument: drop the rest before reading the next jobs.
            now, rows = utc_now(), list[tuple[object, ...]]()
            keys: list[str | None] = []
            while pages:
                for job in client.run(history.page(pages.take(), timeout=timeout)):
                    rows.append(_row(job, now))
                    keys.append(job.key)
        except TookTooLong:
            raise TookTooLong(
                f"The list took longer than {timeout:g} s and was stopped. Narrow it (--state dead, --since 1h, --queue), "
                f"page it (--before), or raise the limit (--timeout)."
            ) from None
    columns = COLUMNS
    if any(key is not None for key in keys):
        at = COLUMNS.index("kind") + 1
        columns = (*COLUMNS[:at], "key", *COLUMNS[at:])
        rows = [(*row[:at], key, *row[at:]) for row, key in zip(rows, keys, strict=True)]
    print_table(columns, rows, right=("id",), whole=("id", "state", "attempt", "when"), styles=timeline.STYLES)
    if len(pages) == limit:
        notice(f"there may be more: --before {pages.last}")
    elif not rows:
        notice(f"no jobs like that: {described(chosen)}" if chosen else "no jobs")


def _row(job: JobRecord, now: datetime) -> tuple[object, ...]:
    arguments = compact(job.args)
    return (
        job.id,
        job.state,
        job.queue,
        job.kind,
        f"{job.attempt}/{job.max_attempts}",
        ago(life.moment_of(job), now),
        arguments if len(arguments) <= SHORT else f"{arguments[:SHORT]}…",
        headline(job.error),
    )


@jobs.command("show")
@click.argument("job_id", type=JOB_ID, metavar="ID")
@schema_option
@dsn_option
@json_option
def show_job(job_id: int, schema: str | None, dsn: str | None, as_json: bool) -> None:
    """Show the history of one job: every attempt, the last error, the arguments and the result.

    Of a durable job also its steps with their results, and its events with their payloads, those included that it was sent
    and has not received: shortened to a line each, and whole with --json.
    """
    with open_store(dsn, schema) as client:
        job = client.job(job_id)
        attempts = client.run(operations.attempts(job_id))
        cancellations = client.cancellations(job_id)
        quarantined = next(iter(client.run(health.quarantined(job_id))), None)
        longest = None if as_json else VALUE
        lines = [] if job.root_id is None else client.run(family.history(job_id, longest=longest))
        unreceived = unreceived_of(client, job_id, longest)
        reasons = [] if job.state in FINISHED else reasons_of(client, job_id)
        owes = owes_clean_up(client, job)
    entries = life.life_of(job, attempts, cancellations, lines, unreceived)
    if as_json:
        print_json(
            {
                **_as_dict(job),
                "quarantine": quarantined,
                "waits_for": reasons,
                "attempts": attempts,
                "cancellations": cancellations,
                "history": whole(lines),
                "unreceived_events": whole(unreceived),
                "owes_clean_up": owes,
                "timeline": entries,
            }
        )
        return
    print_fields(
        fields_of(job)
        | {
            "waits": "\n".join(reason.text for reason in reasons),
            "quarantine": None if quarantined is None else in_quarantine(quarantined),
        }
    )
    click.echo()
    print_rich(timeline.picture(job, entries, utc_now()))
    error, attempt = life.last_error(job, attempts)
    if error is not None:
        click.echo(f"\nlast error{f' (attempt {attempt})' if attempt is not None else ''}:")
        print_error(error)
    if owes:
        notice(said_of_unfinished([job_id]))


def _as_dict(job: JobRecord) -> dict[str, Any]:
    fields: Any = plain(job)
    return fields


# Acting on many

_IDS = click.argument("job_ids", type=JOB_ID, metavar="[ID]...", nargs=-1)
_LIMIT = click.option("--limit", type=WholeNumber(1), metavar="NUMBER", help="At most this many, the oldest first.")
_YES = click.option(
    "--yes", is_flag=True, help="Do not ask before acting on the jobs that a filter finds, or on whole trees."
)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Change nothing; say which jobs would be affected.")


@jobs.command("retry")
@_IDS
@filter_options
@_LIMIT
@click.option(
    "--rate", type=RATE, metavar="RATE", help="Spread the jobs' due times at this rate, starting now: 100/s, 30/min."
)
@click.option(
    "--afresh",
    is_flag=True,
    help="Durable jobs forget their history and begin anew: every step is done again, and received events are received again, "
    "before new ones.",
)
@_YES
@_DRY_RUN
@actor_option
@schema_option
@dsn_option
@json_option
def retry_jobs(job_ids: tuple[int, ...], rate: float | None, afresh: bool, **given: Any) -> int:
    """Run finished jobs again, or waiting ones now.

    Give either IDs or a filter that has at least a state: --state dead --kind send_welcome.

    A retried job keeps its id and its attempts so far. If one of several jobs cannot be retried, the others are, and the exit
    code is 2.
    """
    spacing = history.spacing_of(rate)

    def retry(client: SyncClient, ids: Sequence[int], done: int) -> Retried:
        return client.run(
            history.retry_batch(ids, delay=done * spacing, spacing=spacing, chosen=filter_of(given), afresh=afresh)
        )

    action = _Action("retry", "retried", retry, lambda done: done.retried, afresh=afresh)
    code, moved = action.run(job_ids, given)
    if rate is not None and len(moved) > 1:
        notice(f"they come due over {duration(spacing * (len(moved) - 1))}")
    if not given["as_json"] and job_ids:
        for job_id in moved:
            click.echo(f"{job_id} available")
    return code


@jobs.command("delete")
@_IDS
@filter_options
@_LIMIT
@_YES
@_DRY_RUN
@actor_option
@schema_option
@dsn_option
@json_option
def delete_jobs(job_ids: tuple[int, ...], **given: Any) -> int:
    """Delete finished or waiting jobs for good, with their attempts.

    Give either IDs or a filter that has at least a state. A running job is never deleted: cancel it first.
    """

    def delete(client: SyncClient, ids: Sequence[int], done: int) -> Deleted:
        return client.run(history.delete_batch(ids, chosen=filter_of(given)))

    action = _Action("delete", "deleted", delete, lambda done: done.deleted)
    code, _ = action.run(job_ids, given)
    return code


@jobs.command("retention")
@click.argument("queue", metavar="[QUEUE]", required=False)
@click.argument("time", metavar="[TIME]", type=parsed_retention, required=False)
@actor_option
@schema_option
@dsn_option
@json_option
def retention(
    queue: str | None, time: timedelta | str | None, schema: str | None, dsn: str | None, as_json: bool
) -> None:
    """Show or set how long finished jobs of a queue are kept.

    TIME is a duration such as 12h, 3d or 4w, or "default" for the workers' setting --retention. Jobs are deleted in the
    background, within an hour after that.
    """
    with open_store(dsn, schema) as client:
        if queue is not None and time is not None:
            client.run(history.set_retention(queue, time if isinstance(time, timedelta) else None))
        found = client.run(history.retentions())
    if queue is not None:
        found = {name: kept for name, kept in found.items() if name == queue}
    if as_json:
        print_json([{"queue": name, "retention": kept.total_seconds()} for name, kept in found.items()])
        return
    print_table(("queue", "retention"), [(name, duration(kept.total_seconds())) for name, kept in found.items()])
    if not found:
        notice(f"{f'the queue {queue} has' if queue else 'queues have'} the workers' retention")


class _Action:
    """Applies one action to many jobs, batch by batch: `act(client, ids, how many were done before)`."""

    def __init__(
        self,
        verb: str,
        past: str,
        act: Callable[[SyncClient, Sequence[int], int], Any],
        moved: Callable[[Any], list[int]],
        *,
        afresh: bool = False,
    ) -> None:
        self._verb = verb
        self._past = past
        self._act = act
        self._moved = moved
        self._afresh = afresh

    def run(self, job_ids: Sequence[int], given: dict[str, Any]) -> tuple[int, list[int]]:
        """Returns the exit code and the ids that were moved."""
        chosen = filter_of(given)
        self._check(job_ids, chosen)
        as_json, by_filter = given["as_json"], not job_ids
        with open_store(given["dsn"], given["schema"]) as client:
            ids: Sequence[int] = list(dict.fromkeys(job_ids))[: given["limit"]]
            if by_filter:
                ids = client.run(history.chosen_for_action(chosen, limit=given["limit"]))
            if given["dry_run"]:
                return self._rehearse(client, ids, chosen, as_json=as_json), []
            trees = self._say_before(client, ids, self._owing(client, ids))
            if (by_filter or trees) and ids and not given["yes"] and not self._agreed(len(ids), chosen):
                notice("nothing was done")
                return 0, []
            moved, refused = self._work(client, ids)
        self._report(moved, refused, as_json=as_json, by_filter=by_filter)
        return UsageError.exit_code if refused else 0, moved

    def _owing(self, client: SyncClient, ids: Sequence[int]) -> list[int]:
        return unfinished(client, ids) if self._verb == "retry" else []

    def _say_before(self, client: SyncClient, ids: Sequence[int], owing: Sequence[int]) -> bool:
        """Says what the act does to histories and trees. Returns whether it does something to a tree. `owing`: the jobs that
        owe their clean-up."""
        again = anew(client, ids) if self._verb == "retry" and not self._afresh else []
        rest: Sequence[int] = () if self._afresh else owing
        roots = settled_roots(client, ids)
        trees = on_trees(roots, self._verb, afresh=self._afresh, begin_anew=again, unfinished=rest)
        if rest:
            notice(said_of_unfinished(rest))
        if again:
            notice(said_of_anew(again))
        if trees is not None:
            notice(trees)
            if self._verb == "retry" and (left := said_of_members(client, roots, ids)) is not None:
                notice(left)
        return trees is not None

    def _check(self, job_ids: Sequence[int], chosen: JobFilter) -> None:
        if job_ids and chosen:
            raise UsageError("Give ids or a filter, not both.")
        if not job_ids and not chosen:
            raise UsageError(
                f"Say which jobs: ids, or a filter as in --state dead. See: pulse-trio jobs {self._verb} --help"
            )
        if not job_ids and chosen.get("state") is None:
            raise UsageError("Say which state of jobs is meant, as in --state dead.")

    def _rehearse(self, client: SyncClient, ids: Sequence[int], chosen: JobFilter, *, as_json: bool) -> int:
        known = chosen.get("state")
        state = None if known is None else State(known)
        if self._verb != "delete":
            self._say_before(client, ids, owing := self._owing(client, ids))
            moved, refused = rehearse_retry(client, ids, state, owing)
            if as_json:
                print_json({f"would_be_{self._past}": moved} | ({"refused": refused} if refused else {}))
            else:
                click.echo(f"{count_of(len(moved), 'job')} would be {self._past}")
        else:
            done = rehearse_deletion(client, ids, state)
            if as_json:
                print_json({"would_be_deleted": done.deleted, "members": done.along, "refused": done.refused})
            else:
                click.echo(done)
            refused = done.refused
        self._say(refused)
        return UsageError.exit_code if refused else 0

    def _agreed(self, count: int, chosen: JobFilter) -> bool:
        if not sys.stdin.isatty():
            raise UsageError(
                f"{count_of(count, 'job')} would be {self._past}: give --yes, because there is no terminal to ask on."
            )
        which = f" ({described(chosen)})" if chosen else ""
        return click.confirm(f"{self._verb} {count_of(count, 'job')}{which}?", err=True)

    def _work(self, client: SyncClient, ids: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        moved: list[int] = []
        refused: dict[int, str] = {}
        watched = len(ids) > history.BATCH and sys.stderr.isatty()
        for start in range(0, len(ids), history.BATCH):
            part = ids[start : start + history.BATCH]
            done = self._act(client, part, start)
            moved += self._moved(done)
            refused |= done.refused
            if watched:
                click.echo(f"\r{self._past} {start + len(part):,} of {len(ids):,}", nl=False, err=True)
        if watched:
            click.echo(err=True)
        return moved, refused

    def _report(self, moved: list[int], refused: dict[int, str], *, as_json: bool, by_filter: bool) -> None:
        if as_json:
            print_json({self._past: moved, "refused": refused})
        elif by_filter or self._verb == "delete":
            click.echo(f"{count_of(len(moved), 'job')} {self._past}")
        self._say(refused)

    def _say(self, refused: dict[int, str]) -> None:
        for reason in list(refused.values())[:REASONS]:
            notice(reason)
        if len(refused) > REASONS:
            notice(f"and {len(refused) - REASONS:,} more, which --json shows")
