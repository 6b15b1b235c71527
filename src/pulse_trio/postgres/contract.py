# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
"""The parts of psycopg's private side this room stands on, gathered in one place and checked at import.

psycopg separates *what to wait for* (generators) from *waiting*; the seam between the two is private and has moved
within 3.3.x: `_cancel_gen` lost an argument at 3.3.6, `waiting._ready` came back at 3.3.9. A change there must stop
the program at import with the name of what changed, not corrupt a connection at two in the morning.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg import AsyncConnection, errors, generators, pq, waiting
from psycopg._conninfo_utils import get_param, is_ip_address
from psycopg._cursor_base import BaseCursor
from psycopg._pipeline_async import AsyncPipeline
from psycopg._preparing import PrepareManager
from psycopg._server_cursor_base import ServerCursorMixin
from psycopg.conninfo import conninfo_attempts, timeout_from_conninfo
from psycopg.transaction import AsyncTransaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGconn, PGresult

SUPPORTED = "psycopg>=3.3.9,<3.4"

# Every callable used, and the parameters it must be callable with.
_EXPECTED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "AsyncConnection.wait": (AsyncConnection.wait, ("self", "gen", "interval", "timeout")),
    "AsyncConnection._connect_gen": (AsyncConnection._connect_gen, ("conninfo",)),
    "AsyncConnection._cancel_gen": (AsyncConnection._cancel_gen, ("self",)),
    "AsyncConnection._should_cancel": (AsyncConnection._should_cancel, ("self",)),
    "AsyncConnection._try_cancel": (AsyncConnection._try_cancel, ("self", "timeout")),
    "AsyncConnection._exec_command": (AsyncConnection._exec_command, ("self", "command", "result_format")),
    "AsyncConnection._pipeline_nolock": (AsyncConnection._pipeline_nolock, ("self",)),
    "AsyncConnection._get_connection_params": (AsyncConnection._get_connection_params, ("conninfo", "kwargs")),
    "AsyncTransaction._enter_gen": (AsyncTransaction._enter_gen, ("self",)),
    "AsyncTransaction._exit_gen": (AsyncTransaction._exit_gen, ("self", "exc_type", "exc_val", "exc_tb")),
    "AsyncPipeline.__init__": (AsyncPipeline.__init__, ("self", "conn", "_no_lock")),
    "AsyncPipeline._exit_gen": (AsyncPipeline._exit_gen, ("self",)),
    "BaseCursor._stream_fetchone_gen": (BaseCursor._stream_fetchone_gen, ("self", "first")),
    "PrepareManager.clear": (PrepareManager.clear, ("self",)),
    "ServerCursorMixin._close_gen": (ServerCursorMixin._close_gen, ("self",)),
    "generators.copy_end": (generators.copy_end, ("pgconn", "error")),
    "generators.copy_from": (generators.copy_from, ("pgconn",)),
    "generators.notifies": (generators.notifies, ("pgconn",)),
    "conninfo.conninfo_attempts": (conninfo_attempts, ("params",)),
}


class PsycopgContractError(ImportError):
    """The installed psycopg is not one this driver was written for; the message names what differs."""


def check() -> None:
    """Compare the installed psycopg with what this room was written against.

    Raises:
        PsycopgContractError: naming every private function that is gone or takes other parameters.
    """
    differences = [
        f"{name}{tuple(inspect.signature(function).parameters)} instead of {parameters}"
        for name, (function, parameters) in _EXPECTED.items()
        if tuple(inspect.signature(function).parameters) != parameters
    ]
    differences += [
        f"{module.__name__}.{name} is gone"
        for module, name in ((waiting, "_ready"), (errors, "_WaitTimeout"), (errors, "_NO_TRACEBACK"))
        if not hasattr(module, name)
    ]
    if differences:
        raise PsycopgContractError(
            f"psycopg {psycopg.__version__} differs from what pulse_trio.postgres was written for ({SUPPORTED}): "
            + "; ".join(differences)
        )


check()

WaitTimeout = errors._WaitTimeout
ready_now: Callable[[int, int], int] = waiting._ready  # pyright: ignore[reportAssignmentType]
"""Which of the wanted directions a descriptor is ready for at this moment, without waiting."""


def _is_made_by(*functions: Callable[..., Any]) -> Callable[[object], bool]:
    codes = frozenset(function.__code__ for function in functions)
    return lambda gen: getattr(gen, "gi_code", None) in codes


waits_for_news = _is_made_by(generators.notifies)
"""Whether a generator waits for notifications, which has no natural end."""
closes_a_cursor = _is_made_by(cast("Callable[..., Any]", ServerCursorMixin._close_gen))
"""Whether a generator is the CLOSE of a server-side cursor: clean-up, whatever class the cursor is of."""


def _nobodys() -> PGconn:
    connection = pq.PGconn.connect_start(b"nobody's")
    connection.finish()
    return connection


def several(pgconn: PGconn, commands: bytes) -> PQGen[PGresult]:
    """Commands in one message of the simple protocol: the last one's result, or the first error."""
    pgconn.send_query(commands)
    results = yield from generators.execute(pgconn)
    for result in results:
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise errors.error_from_result(result, encoding=pgconn._encoding)
    return results[-1]


NOBODYS: PGconn = _nobodys()
"""A closed connection: what is left to an object whose session was taken away."""

__all__ = [
    "NOBODYS",
    "SUPPORTED",
    "AsyncPipeline",
    "AsyncTransaction",
    "PsycopgContractError",
    "WaitTimeout",
    "check",
    "closes_a_cursor",
    "conninfo_attempts",
    "get_param",
    "is_ip_address",
    "ready_now",
    "several",
    "timeout_from_conninfo",
    "waits_for_news",
]
