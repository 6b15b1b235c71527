"""`pulse-trio web`: the web page, served by Hypercorn on Trio."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click
import trio

from .. import logs
from ..errors import ConfigurationError
from ..migrate import check_sync
from ..settings import load_settings
from ..worker.metrics.server import beside, keep_serving, listening, shown_address
from .database import choose_database, open_database_async
from .options import WholeNumber, dsn_option, schema_option
from .output import notice

if TYPE_CHECKING:
    from .database import Choice


@click.command("web")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", type=WholeNumber(0, 65535), default=8080, show_default=True, help="0: any that is free.")
@click.option("--read-only", is_flag=True, help="Show everything, and change nothing.")
@click.option(
    "--hash-password",
    is_flag=True,
    help="Ask for a password (or read a line of the standard input), print its hash for PULSE_TRIO_WEB_USERS, and end.",
)
@schema_option
@dsn_option
def web(host: str, port: int, read_only: bool, hash_password: bool, schema: str | None, dsn: str | None) -> int:
    """Serve the web page: what runs, what waits, what fails and why, and what can be done about it.

    Without users it answers browsers on this machine alone; PULSE_TRIO_WEB_USERS names those who may log in from others. It
    needs the extra: pip install 'pulse-trio[web]'. Ctrl-C or SIGTERM ends it. A database that is away at its start, or has no
    schema, is an error; one that goes away later gives pages that say so, until it is back.
    """
    check_installed()
    if hash_password:
        _print_hash()
        return 0
    from ..web.security import check_reach, web_settings

    settings = web_settings(os.environ)
    for warning in check_reach(host, settings):
        notice(warning)
    choice = choose_database(dsn)
    logs.set_up(as_json=False, verbose=False)
    name = load_settings({"schema": schema}).schema
    if choice.dsn is not None:
        # The embedded PostgreSQL is started, and migrated, for it.
        notice(str(choice))
        check_sync(choice.dsn, name)
    trio.run(
        _serve,
        choice,
        name,
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        read_only,
    )
    return 0


def _print_hash() -> None:
    from ..web.security import hash_password

    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    click.echo(hash_password(password))


def check_installed() -> None:
    """Raises `ConfigurationError` if the libraries of the extra are missing."""
    from .. import web as package

    package.check_installed()
    try:
        import_module("hypercorn.trio")
    except ImportError as error:
        raise ConfigurationError(
            f"The web page needs libraries that are not installed ({error}). Install them: {package.HOW_TO_INSTALL}"
        ) from None


async def _serve(choice: Choice, schema: str, address: str, read_only: bool) -> None:
    from ..web import create_app

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_database_async(choice, schema, notice if choice.dsn is None else _say_nothing) as dsn:
            app: Any = create_app(dsn, read_only=read_only, schema=schema)
            with await trio.to_thread.run_sync(listening, address, "--host and --port") as listener:
                async with beside() as nursery:
                    nursery.start_soon(_serve_app, listener, app)
                    notice(f"the web page is at http://{shown_address(listener)}/ (Ctrl-C ends it)")
                    async for _ in signals:
                        break


def _say_nothing(_: str) -> None:
    """Which database it is was said before."""


async def _serve_app(listener: Any, app: Any) -> None:
    await keep_serving(listener, app, what="the web page", streams=True)
