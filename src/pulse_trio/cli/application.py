"""Assembles the commands; at this boundary every exception becomes a message and an exit code."""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from importlib.metadata import version
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from .audit import audit
from .bench import bench
from .cancel import cancel_jobs
from .completion import install_completion
from .cron import cron
from .doctor import doctor
from .enqueue import enqueue
from .events import send_event
from .faults import describe, exit_code_of, our_error
from .force import complete_jobs, release_jobs
from .grants import grants
from .init import init
from .jobs import jobs
from .migrate import migrate
from .output import complain
from .queues import queues
from .run import run
from .stack import stack
from .streams import STDOUT, open_closed_streams, write_whole
from .top import top
from .tree import show_tree
from .web import web
from .workers import workers

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""
PIPE_CLOSED = 141
"""128 + SIGPIPE: the reader of the output has gone (`| head`)."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN)
"""The errors of a stream on a full disk, over a quota, on a broken device, closed, or that does not block and is full."""


class Commands(click.Group):
    """A click group that survives the loss of its output's reader."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            _flush_stdout()
        except BrokenPipeError:
            # Handled here, because click would exit with 1, which is our code for the database's fault.
            _forget_stdout()
            return PIPE_CLOSED
        return code


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("pulse-trio"), prog_name="pulse-trio", message="%(prog)s %(version)s")
@click.option(
    "--install-completion",
    metavar="SHELL",
    type=click.Choice(["auto", "bash", "zsh", "fish"]),
    is_flag=False,
    flag_value="auto",
    expose_value=False,
    is_eager=True,
    callback=install_completion,
    help="Install Tab completion of commands and options for bash, zsh or fish (by default the shell in SHELL), print the "
    "file's path, and exit.",
)
def pulse_trio() -> None:
    """Background jobs for Trio on PostgreSQL.

    The database is the one given with --dsn, else PULSE_TRIO_DSN, else DATABASE_URL, else `dsn` in pulse-trio.toml or
    [tool.pulse-trio], else an embedded PostgreSQL in the project's folder.

    Exit codes: 0 done, 1 an error (the database's fault), 2 wrong usage (yours), 3 `run` was stopped before its jobs
    had ended.
    """


jobs.add_command(cancel_jobs)
jobs.add_command(release_jobs)
jobs.add_command(complete_jobs)
jobs.add_command(show_tree)
jobs.add_command(send_event)
for _command in (
    init,
    run,
    enqueue,
    jobs,
    queues,
    cron,
    workers,
    stack,
    top,
    audit,
    migrate,
    grants,
    doctor,
    web,
    bench,
):
    pulse_trio.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    # The collector then leaves the imported modules alone, which stay until the end anyway. Python scans them all several times
    # when it ends: that was a quarter of what a short command cost.
    gc.freeze()
    open_closed_streams()
    write_whole()
    for stream in (sys.stdout, sys.stderr):
        # Print data in any terminal encoding, escaping what it cannot show.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(status_of(arguments))


def status_of(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; reports errors on stderr and returns the exit code."""
    try:
        code = pulse_trio.main(arguments, prog_name="pulse-trio", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        complain(_describe_click(error))
        return error.exit_code
    except OSError as error:
        # The error of a file has a name; that of a stream has none.
        if error.errno not in NO_ROOM or error.filename is not None:
            return _report(error)
        # The command has done its work; only its output is lost.
        _forget_stdout()
        complain(f"the output could not be written to stdout: {error.strerror}")
        return 1
    except Exception as error:
        return _report(error)
    except BaseExceptionGroup as group:
        return INTERRUPTED if group.subgroup(KeyboardInterrupt) else _report(group)
    return code or 0


def _report(error: BaseException) -> int:
    ours = our_error(error)
    if ours is None:
        traceback.print_exception(error)
        complain("the error above is a bug in pulse-trio; please report it with its traceback.")
        return 1
    complain(describe(ours))
    return exit_code_of(ours)


def _describe_click(error: click.ClickException) -> str:
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message} See: {error.ctx.command_path} --help"
    return message


def _flush_stdout() -> None:
    stdout: TextIO = sys.stdout
    # A handler may have closed it, left it redirected to a file that is closed, or put in its place what is no file.
    if not getattr(stdout, "closed", True):
        stdout.flush()


def _forget_stdout() -> None:
    # Python flushes stdout once more at exit, and would report the error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
