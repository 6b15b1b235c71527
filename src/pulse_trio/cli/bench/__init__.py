"""`pulse-trio bench`: measures this machine and this database, in a temporary schema."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import trio
from trio.lowlevel import in_trio_run

from ...settings import MOST_AT_ONCE
from ..database import choose_database, open_database
from ..options import Number, dsn_option, json_option
from ..output import print_fields, print_json
from . import measures
from .ground import open_ground
from .progress import open_bar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from .ground import Ground
    from .progress import Bar

    Measure = Callable[[Ground, Bar], Awaitable[measures.Figures]]

_ENDING = (signal.SIGTERM, signal.SIGHUP)

jobs_option = partial(click.option, "--jobs", type=click.IntRange(1, 10_000_000), metavar="NUMBER", show_default=True)
together_option = partial(
    click.option, type=click.IntRange(1, MOST_AT_ONCE), default=500, metavar="NUMBER", show_default=True
)
runs_option = click.option(
    "--runs", type=click.IntRange(1, 100), default=3, metavar="NUMBER", show_default=True, help="The median counts."
)


@click.group()
def bench() -> None:
    """Measure claiming, draining, enqueuing and latency.

    The bench uses its own schema, which it creates first and always drops. It does not touch other jobs in the database, but
    the load is real: do not run it on a busy server.
    """


@bench.command()
@jobs_option(default=20_000, help="No-op jobs to drain.")
@together_option("--concurrency", help="Jobs at once.")
@runs_option
@dsn_option
@json_option
def drain(jobs: int, concurrency: int, runs: int, dsn: str | None, as_json: bool) -> None:
    """Jobs per second of one worker process, PostgreSQL included.

    The jobs exist before the clock starts, and finished jobs are kept in the archive. The clock is the database's,
    from the first claim to the last completion; CPU time is the worker process's own.
    """
    measure = partial(measures.drain, jobs=jobs, concurrency=concurrency)
    _run("drain", measure, {"jobs": jobs, "concurrency": concurrency}, dsn, as_json=as_json, runs=runs)


@bench.command()
@jobs_option(default=20_000, help="Jobs to claim and complete.")
@together_option("--batch", help="Jobs a claim.")
@runs_option
@dsn_option
@json_option
def claim(jobs: int, batch: int, runs: int, dsn: str | None, as_json: bool) -> None:
    """Jobs claimed and completed per second over one connection, without handlers: what the database allows."""
    measure = partial(measures.claim, jobs=jobs, batch=batch)
    _run("claim", measure, {"jobs": jobs, "batch": batch}, dsn, as_json=as_json, runs=runs)


@bench.command()
@jobs_option(default=20_000, help="Jobs for enqueue_many; a twentieth of them are enqueued one by one.")
@runs_option
@dsn_option
@json_option
def enqueue(jobs: int, runs: int, dsn: str | None, as_json: bool) -> None:
    """Jobs enqueued per second by one client: one by one, a commit each, and with enqueue_many."""
    _run("enqueue", partial(measures.enqueue, jobs=jobs), {"jobs": jobs}, dsn, as_json=as_json, runs=runs)


@bench.command()
@jobs_option(default=200, help="Jobs to time.")
@click.option(
    "--every",
    type=Number(0.001, 86400),
    default=0.05,
    metavar="SECONDS",
    show_default=True,
    help="The time from one job to the next.",
)
@dsn_option
@json_option
def latency(jobs: int, every: float, dsn: str | None, as_json: bool) -> None:
    """Milliseconds from the sending of a job's COMMIT to the start of its handler, in a worker that was idle."""
    measure = partial(measures.latency, jobs=jobs, every=every)
    _run("latency", measure, {"jobs": jobs, "every": every}, dsn, as_json=as_json, runs=1)


def _run(name: str, measure: Measure, parameters: dict[str, Any], dsn: str | None, *, as_json: bool, runs: int) -> None:
    with (
        _ending_as_ctrl_c() as early,
        open_database(choose_database(dsn), "pulse", migrate=False) as address,
        open_ground(address) as ground,
        open_bar() as bar,
    ):
        found = [trio.run(_until_signalled, measure, ground, bar.run(n, runs), early) for n in range(1, runs + 1)]
    medians = _medians(found)
    if as_json:
        print_json({"bench": name, **parameters, "postgresql": ground.version, "median": medians, "runs": found})
    else:
        _show(name, parameters, medians, found)


async def _until_signalled(measure: Measure, ground: Ground, bar: Bar, early: list[int]) -> measures.Figures:
    """Cancelled rather than interrupted: an exception from a signal could strike inside the worker."""
    figures: measures.Figures = {}
    async with trio.open_nursery() as nursery:
        await nursery.start(_cancel_at_signal, nursery.cancel_scope, early)
        figures = await measure(ground, bar)
        nursery.cancel_scope.cancel()
    if not figures:
        raise click.Abort
    return figures


async def _cancel_at_signal(
    scope: trio.CancelScope, early: list[int], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    # One that is ignored stays ignored: the terminal's Ctrl-C is not meant for what runs in the background.
    heard = [n for n in (signal.SIGINT, *_ENDING) if signal.getsignal(n) is not signal.SIG_IGN]
    with trio.open_signal_receiver(*heard) as signals:
        if early:
            scope.cancel()
        task_status.started()
        async for _ in signals:
            scope.cancel()


def _medians(found: list[measures.Figures]) -> measures.Figures:
    return {name: median(run[name] for run in found) for name in found[0]}


def _show(name: str, parameters: dict[str, Any], medians: measures.Figures, found: list[measures.Figures]) -> None:
    click.echo(f"{name}: {', '.join(f'{key} {value}' for key, value in parameters.items())}")
    print_fields({key.replace("_", " "): _with_spread(key, value, found) for key, value in medians.items()})


def _with_spread(key: str, value: float, found: list[measures.Figures]) -> str:
    runs = sorted(run[key] for run in found)
    spread = f"  ({_figure(runs[0])} to {_figure(runs[-1])} in {len(runs)} runs)" if len(runs) > 1 else ""
    return f"{_figure(value)}{spread}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def _ending_as_ctrl_c() -> Generator[list[int]]:
    """SIGTERM, and a terminal that is closed, end the bench as Ctrl-C does, so that its schema is dropped. Yields the signals
    that came while Trio was on its way in or out: whoever listens within Trio asks for them first."""
    # A shell without job control has what it starts in the background ignore SIGINT: `nohup pulse-trio bench drain &`.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    early: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        if not ignored:
            # Raised again as SIGINT, whose handler is Trio's while Trio runs, and spares Trio's own insides.
            signal.raise_signal(signal.SIGINT)
        elif in_trio_run():
            early.append(number)
        else:
            raise KeyboardInterrupt

    # `nohup` has SIGHUP ignored, and it stays so.
    before = {n: signal.signal(n, interrupt) for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield early
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
