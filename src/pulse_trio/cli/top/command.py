"""`pulse-trio top`: the command."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, cast

import click
import trio

from ...errors import UsageError
from ...migrate import check_sync
from ...plain import plain
from ...postgres import connect_or_unavailable
from ...postgres.dsn import shown_dsn
from ...settings import load_settings
from ...states import State
from ...text import utc_now
from ..database import choose_database, open_database
from ..filters import STATES
from ..options import Number, actor_option, chosen_actor, dsn_option, json_option, schema_option
from ..output import print_json, terminal
from .drawing import draw
from .live import run_live
from .model import Model, filter_of
from .reading import Frame, look

if TYPE_CHECKING:
    from .screen import Screen

WIDTH, HEIGHT = 120, 40
"""The size of one frame that is printed where there is no terminal."""
LISTED = 50


@click.command()
@click.option("--queue", metavar="NAME", help="List only jobs of this queue.")
@click.option(
    "--state",
    type=click.Choice(["all", *STATES]),
    default="running",
    metavar="STATE",
    show_default=True,
    help=f"List only jobs in this state: all, {', '.join(STATES)}.",
)
@click.option("--kind", metavar="NAME", help="List only jobs of this kind.")
@click.option(
    "--interval",
    type=Number(0.2, 3600),
    default=2.0,
    metavar="SECONDS",
    show_default=True,
    help="The time between two looks at the database.",
)
@click.option("--once", is_flag=True, help="Print one frame, and end.")
@actor_option
@schema_option
@dsn_option
@json_option
def top(
    queue: str | None,
    state: str,
    kind: str | None,
    interval: float,
    once: bool,
    schema: str | None,
    dsn: str | None,
    as_json: bool,
) -> int:
    """Show queues, workers and jobs, live, in the terminal; ? shows the keys that filter, move and act.

    Every act (retry, cancel, pause, resume) asks first. Counts are bounded, so it costs the database the same however many jobs
    wait. While the database does not answer, the view says so and goes on by itself. --once and --json print one frame.

    Exit codes: 0 left with q, 130 with Ctrl-C, 1 the database could not be reached at the start.
    """
    name = load_settings({"schema": schema}).schema
    chosen = None if state == "all" else State(state)
    with open_database(choose_database(dsn), name) as address:
        model = Model(where=shown_dsn(address), chosen=filter_of(chosen, queue, kind))
        if once or as_json:
            check_sync(address, name)
            model.frame = trio.run(_one_look, address, name, model)
            _print(model, model.frame, as_json)
            return 0
        screen = _screen()
        check_sync(address, name)
        actor = chosen_actor()
        return trio.run(lambda: run_live(screen, model, address, schema=name, interval=interval, actor=actor))


def _screen() -> Screen:
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError("`pulse-trio top` needs a terminal to draw on. Without one: --once or --json.")
    from .screen import Screen as Taken  # has termios, which Windows has not

    return Taken(sys.stdin.fileno(), sys.stdout.fileno())


async def _one_look(dsn: str, schema: str, model: Model) -> Frame:
    async with await connect_or_unavailable(dsn, own=True, autocommit=True) as connection:
        return await look(connection, schema, model.chosen, LISTED, now=utc_now())


def _print(model: Model, frame: Frame, as_json: bool) -> None:
    if as_json:
        seen = cast("dict[str, object]", plain(frame.glance))
        more = {"rates": frame.rates, "jobs": frame.jobs, "recent": frame.lately.found, "troubles": frame.troubles}
        print_json({"at": frame.at, **seen, **more})
        return
    model.settle()
    model.pane = "none"
    console = terminal()
    size = tuple(console.size) if console.is_terminal else (WIDTH, HEIGHT)
    lines = draw(model, console, (size[0], size[1]))[:-1]
    click.echo("\n".join(lines).rstrip())
