"""From a connection string to the first server that answers: names resolved off the loop, hosts in turn, each with
its time.

libpq's asynchronous interface honours neither `connect_timeout` nor the step to the next host when one is silent, so,
like psycopg itself, we make one attempt per address.
"""

from __future__ import annotations

import codecs
import warnings
from typing import TYPE_CHECKING, TypeVar

import trio
from psycopg import capabilities
from psycopg import errors as e
from psycopg.conninfo import make_conninfo

from pulse_trio.postgres.contract import conninfo_attempts, get_param, is_ip_address, timeout_from_conninfo
from pulse_trio.postgres.waiting import drive_connecting

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.abc import ConnDict, PQGenConn
    from psycopg.pq.abc import PGconn

C = TypeVar("C")
T = TypeVar("T")

# Host names need this encoding, whose module Python imports at the first use: when a connection is lost, the process may have
# no file descriptor left to read it.
codecs.lookup("idna")


async def connect_to_first(start: Callable[[str], PQGenConn[C]], params: ConnDict) -> C:
    """Try every address in turn and return the first connection.

    Args:
        start: makes the connecting generator for one conninfo string.
        params: connection parameters; `connect_timeout` (seconds) counts for each attempt.

    Raises:
        psycopg.OperationalError: no server answered; the message holds every failure.
        psycopg.errors.ConnectionTimeout: the last of them ran out of time.
    """
    timeout = timeout_from_conninfo(params)
    failures: list[tuple[ConnDict, e.Error]] = []
    for attempt in await resolve(params):
        try:
            return await _connect(start(make_conninfo("", **attempt)), timeout)
        except e.Error as ex:
            failures.append((attempt, ex))
    raise summary(failures)


async def resolve(params: ConnDict) -> list[ConnDict]:
    """The attempts to make, one per address.

    Only host names cost a thread (349 µs); the thread is abandoned on cancellation.
    """
    if _has_names(params):
        return await in_thread(conninfo_attempts, params)
    return conninfo_attempts(params)


async def in_thread(call: Callable[[T], C], value: T) -> C:
    """Calls it in a thread, which is abandoned on cancellation. If the system refuses a thread (out of memory), raises
    `psycopg.OperationalError`, so that the caller may try again."""
    ran = False

    def running() -> C:
        nonlocal ran
        ran = True
        return call(value)

    try:
        return await trio.to_thread.run_sync(running, abandon_on_cancel=True)
    except (RuntimeError, MemoryError) as error:
        if ran:
            raise
        raise e.OperationalError(f"the system refused a thread: {error}") from error


def _has_names(params: ConnDict) -> bool:
    hosts = get_param(params, "host")
    if not hosts or get_param(params, "hostaddr"):
        return False
    return any(host and not host.startswith(("/", "@")) and not is_ip_address(host) for host in hosts.split(","))


async def _connect(gen: PQGenConn[C], seconds: float) -> C:
    try:
        with trio.move_on_after(seconds):
            return await drive_connecting(gen)
    finally:
        gen.close()  # an unfinished attempt owns a socket
    raise e.ConnectionTimeout("connection timeout expired")


def warn_of_gssapi(pgconn: PGconn, params: ConnDict) -> None:
    """Warn, as psycopg does, of GSSAPI encryption that was not requested: not every libpq would have chosen it."""
    if capabilities.has_used_gssapi() and pgconn.used_gssapi and not get_param(params, "gssencmode"):
        warnings.warn(
            "the connection uses GSSAPI only because libpq's default is 'gssencmode=prefer', which another build of "
            "libpq may not share: set 'gssencmode' in the connection string, or the environment variable "
            "PGGSSENCMODE, to 'prefer', 'require' or 'disable'",
            RuntimeWarning,
            stacklevel=3,
        )


def summary(failures: list[tuple[ConnDict, e.Error]]) -> e.Error:
    """The error of a connection that no address gave: the last of its failures, with all of them in its message."""
    _, last = failures[-1]
    if len(failures) == 1:
        return last.with_traceback(None)
    lines = [f"- {_where(attempt)}: {error}" for attempt, error in failures]
    text = "\n".join([str(last), "Multiple connection attempts failed. All failures were:", *lines])
    return type(last)(text, pgconn=last.pgconn)


def _where(attempt: ConnDict) -> str:
    return ", ".join(f"{key}: {attempt.get(key)!r}" for key in ("host", "port", "hostaddr"))
