"""One action on many jobs: those that ids name, or that a filter finds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ..errors import PulseTrioError, UsageError
from ..states import State
from ..store import history, rehearsing
from ..store.places import left_to_parents
from ..text import count_of
from .database import open_store
from .filters import described, filter_of
from .output import notice, print_json
from .roots import on_trees, said_of_anew, said_of_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..client import SyncClient
    from ..store.filtering import JobFilter

_REASONS = 20
"""How many refusals are reported one by one."""


class Action:
    """Applies one action to many jobs, batch by batch: `act(client, ids, how many went before, those of them that were moved)`.
    What it returns may have jobs that it has left to retried parents."""

    def __init__(
        self,
        verb: str,
        past: str,
        act: Callable[[SyncClient, Sequence[int], int, Sequence[int]], Any],
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
            trees = self._say_before(client, ids, client.run(rehearsing.unfinished(ids)))
            if (by_filter or trees) and ids and not given["yes"] and not self._agreed(len(ids), chosen):
                notice("nothing was done")
                return 0, []
            moved, refused, left = self._work(client, ids, again=given["limit"] is None)
        self._report(moved, refused, left, as_json=as_json, by_filter=by_filter)
        return UsageError.exit_code if refused else 0, moved

    def _say_before(self, client: SyncClient, ids: Sequence[int], owing: Sequence[int]) -> bool:
        """Says what the act does to histories and trees. Returns whether it does something to a tree. `owing`: the jobs that
        owe their clean-up."""
        retries = self._verb == "retry"
        again = client.run(rehearsing.anew(ids)) if retries and not self._afresh else []
        rest: Sequence[int] = owing if retries and not self._afresh else ()
        roots = client.run(rehearsing.settled_roots(ids))
        trees = on_trees(roots, self._verb, afresh=self._afresh, begin_anew=again, unfinished=rest)
        if rest:
            notice(said_of_unfinished(rest))
        if again:
            notice(said_of_anew(again))
        if not retries and (lost := client.run(rehearsing.owing_below(roots, owing))):
            notice(_said_of_lost(lost))
        if trees is not None:
            notice(trees)
            if retries and (left := client.run(rehearsing.left_owing(roots, ids))):
                notice(rehearsing.said_of_left(left))
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
            self._say_before(client, ids, owing := client.run(rehearsing.unfinished(ids)))
            done = client.run(rehearsing.rehearse_retry(ids, state, owing, afresh=self._afresh))
            moved, refused, left = done.retried, done.refused, done.left_to_parents
            if as_json:
                more = {
                    "refused": refused,
                    "left_to_parents": left,
                    "owe_clean_up": [] if self._afresh else owing,
                }
                print_json({f"would_be_{self._past}": moved} | {name: each for name, each in more.items() if each})
            else:
                click.echo(f"{count_of(len(moved), 'job')} would be {self._past}")
            self._say_left(left)
        else:
            done = client.run(rehearsing.rehearse_deletion(ids, state))
            if done.owing:
                notice(_said_of_lost(done.owing))
            if as_json:
                more = {"owe_clean_up": done.owing} if done.owing else {}
                print_json({"would_be_deleted": done.deleted, "members": done.along, "refused": done.refused} | more)
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

    def _work(
        self, client: SyncClient, ids: Sequence[int], *, again: bool
    ) -> tuple[list[int], dict[int, str], list[int]]:
        """Returns the jobs that were moved, those that were refused and why, and those that are left to their parents. `again`:
        whether the same command would do the rest."""
        moved: list[int] = []
        refused: dict[int, str] = {}
        left: list[int] = []
        start = 0
        watched = len(ids) > history.BATCH and sys.stderr.isatty()
        try:
            for start in range(0, len(ids), history.BATCH):
                part = ids[start : start + history.BATCH]
                done = self._act(client, part, start, moved)
                moved += self._moved(done)
                refused |= done.refused
                left += getattr(done, "left_to_parents", ())
                if watched:
                    click.echo(f"\r{self._past} {start + len(part):,} of {len(ids):,}", nl=False, err=True)
        except (KeyboardInterrupt, PulseTrioError):
            if watched:
                click.echo(err=True)
            notice(self._so_far(len(moved), len(ids), start, again=again))
            raise
        if watched:
            click.echo(err=True)
        return moved, refused, left

    def _so_far(self, moved: int, of: int, start: int, *, again: bool) -> str:
        # Each batch is committed by itself; that of the one under way may have been on its way.
        under_way = min(history.BATCH, of - start)
        said = (
            f"{self._past} until then: {moved:,} of {count_of(of, 'job')}, and perhaps some of the next {under_way:,}"
        )
        return f"{said}; give the command again for the rest" if again else said

    def _report(
        self, moved: list[int], refused: dict[int, str], left: list[int], *, as_json: bool, by_filter: bool
    ) -> None:
        if as_json:
            print_json({self._past: moved, "refused": refused} | ({"left_to_parents": left} if left else {}))
        elif by_filter or self._verb == "delete":
            click.echo(f"{count_of(len(moved), 'job')} {self._past}")
        self._say_left(left)
        self._say(refused)

    def _say_left(self, left: Sequence[int]) -> None:
        if left:
            notice(left_to_parents(len(left), afresh=self._afresh))

    def _say(self, refused: dict[int, str]) -> None:
        for reason in list(refused.values())[:_REASONS]:
            notice(reason)
        if len(refused) > _REASONS:
            notice(f"and {len(refused) - _REASONS:,} more, which --json shows")


def _said_of_lost(owing: Sequence[int]) -> str:
    return f"{rehearsing.said_of_lost(owing)}: see pulse-trio jobs retry"
