# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
"""The private parts of psycopg that this package depends on, in one place and checked at import.

psycopg separates *what to wait for* (generators) from *waiting*; the seam between the two is private and has moved
within 3.3.x: `_cancel_gen` lost an argument at 3.3.6, `waiting._ready` came back at 3.3.9. A change there must stop the
program at import with the name of the changed part, not corrupt a connection later.

`TrioConnection`, `TrioTransaction` and `TrioPipeline` override and use inherited private methods directly; each name that
they use is checked here too, and a test verifies that.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg import AsyncConnection, Connection, conninfo, errors, generators, pq, waiting
from psycopg.adapt import AdaptersMap
from psycopg.transaction import AsyncTransaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGconn, PGresult

SUPPORTED = "psycopg>=3.3.9,<3.4"
"""As in pyproject.toml."""
TRIED = "3.3.9"


class PsycopgContractError(ImportError):
    """This driver does not support the installed psycopg; the message names the differences."""


def _refusal(*differences: str) -> PsycopgContractError:
    return PsycopgContractError(
        f"psycopg {psycopg.__version__} differs from what pulse_trio.postgres was written for"
        f" ({SUPPORTED}; tried with {TRIED}): {'; '.join(differences)}"
    )


try:
    from psycopg._conninfo_utils import get_param, is_ip_address
    from psycopg._cursor_base import BaseCursor
    from psycopg._pipeline_async import AsyncPipeline
    from psycopg._preparing import PrepareManager
    from psycopg._server_cursor_base import ServerCursorMixin
    from psycopg.conninfo import conninfo_attempts, timeout_from_conninfo
except ImportError as missing:
    raise _refusal(str(missing)) from missing

# Every callable used, and the parameters it must be callable with.
_EXPECTED: dict[tuple[Any, str], tuple[str, ...]] = {
    (AsyncConnection, "wait"): ("self", "gen", "interval", "timeout"),
    (AsyncConnection, "_check_connection_ok"): ("self",),
    (AsyncConnection, "_connect_gen"): ("conninfo",),
    (AsyncConnection, "_cancel_gen"): ("self",),
    (AsyncConnection, "_should_cancel"): ("self",),
    (AsyncConnection, "_try_cancel"): ("self", "timeout"),
    (AsyncConnection, "_exec_command"): ("self", "command", "result_format"),
    (AsyncConnection, "_pipeline_nolock"): ("self",),
    (AsyncConnection, "_get_connection_params"): ("conninfo", "kwargs"),
    (Connection, "wait"): ("self", "gen", "interval", "timeout"),
    (Connection, "_connect_gen"): ("conninfo",),
    (waiting, "wait_conn"): ("gen", "interval", "timeout"),
    (AsyncTransaction, "_enter_gen"): ("self",),
    (AsyncTransaction, "_exit_gen"): ("self", "exc_type", "exc_val", "exc_tb"),
    (AsyncPipeline, "__init__"): ("self", "conn", "_no_lock"),
    (AsyncPipeline, "_exit_gen"): ("self",),
    (BaseCursor, "_stream_fetchone_gen"): ("self", "first"),
    (PrepareManager, "clear"): ("self",),
    (ServerCursorMixin, "_close_gen"): ("self",),
    (generators, "copy_end"): ("pgconn", "error"),
    (generators, "copy_from"): ("pgconn",),
    (generators, "notifies"): ("pgconn",),
    (conninfo, "conninfo_attempts"): ("params",),
}
_THERE = ((waiting, "_ready"), (errors, "_WaitTimeout"), (errors, "_NO_TRACEBACK"))
_KEPT = (
    "_adapters",
    "_autocommit",
    "_closed",
    "_deferrable",
    "_isolation_level",
    "_notifies_backlog",
    "_num_transactions",
    "_pipeline",
    "_prepared",
    "_read_only",
)
"""The private attributes of a connection that this package reads or changes."""


def check() -> None:
    """Compare the installed psycopg with the one this package was written for.

    Raises:
        PsycopgContractError: naming every private function that is gone or takes other parameters.
    """
    differences: list[str] = []
    for (owner, name), parameters in _EXPECTED.items():
        function = getattr(owner, name, None)
        if function is None:
            differences.append(f"{owner.__name__}.{name} is gone")
        elif (found := tuple(inspect.signature(function).parameters)) != parameters:
            differences.append(f"{owner.__name__}.{name}{found} instead of {parameters}")
    differences += [f"{module.__name__}.{name} is gone" for module, name in _THERE if not hasattr(module, name)]
    if differences:
        raise _refusal(*differences)
    connection = AsyncConnection[Any](NOBODYS)
    differences += [f"a connection keeps no {name}" for name in _KEPT if not hasattr(connection, name)]
    made = (AsyncTransaction(connection), AsyncPipeline(connection))
    differences += [f"{type(each).__name__} keeps no _conn" for each in made if not hasattr(each, "_conn")]
    if differences:
        raise _refusal(*differences)


def _nobodys() -> PGconn:
    connection = pq.PGconn.connect_start(b"nobody's")
    connection.finish()
    return connection


NOBODYS: PGconn = _nobodys()
"""A closed connection, for an object whose session was handed over."""

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


def several(pgconn: PGconn, commands: bytes) -> PQGen[PGresult]:
    """Commands in one message of the simple protocol: the last one's result, or the first error."""
    results = yield from answers(pgconn, commands)
    for result in results:
        if (failure := failure_of(pgconn, result)) is not None:
            raise failure
    return results[-1]


def answers(pgconn: PGconn, commands: bytes) -> PQGen[list[PGresult]]:
    """Commands in one message of the simple protocol: their results, until the first error."""
    pgconn.send_query(commands)
    return (yield from generators.execute(pgconn))


def failure_of(pgconn: PGconn, result: PGresult) -> errors.Error | None:
    """The error that a result is, if it is one."""
    if result.status != pq.ExecStatus.FATAL_ERROR:
        return None
    return errors.error_from_result(result, encoding=pgconn._encoding)


def adopt_adapters(connection: AsyncConnection[Any] | Connection[Any], adapters: AdaptersMap) -> None:
    """Give a connection a copy of these adapters; psycopg itself does so only for a `context` at connecting."""
    connection._adapters = AdaptersMap(adapters)


def forget_statements(connection: AsyncConnection[Any]) -> None:
    """Make a connection prepare its statements again."""
    connection._prepared.clear()


__all__ = [
    "NOBODYS",
    "SUPPORTED",
    "AsyncPipeline",
    "AsyncTransaction",
    "PsycopgContractError",
    "WaitTimeout",
    "adopt_adapters",
    "answers",
    "check",
    "closes_a_cursor",
    "conninfo_attempts",
    "failure_of",
    "forget_statements",
    "get_param",
    "is_ip_address",
    "ready_now",
    "several",
    "timeout_from_conninfo",
    "waits_for_news",
]
