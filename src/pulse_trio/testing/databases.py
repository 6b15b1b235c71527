"""A database for each test: a copy of one that is migrated once a run. The next copy is made while a test runs.

The server is the one that `--pulse-dsn` names, else an embedded PostgreSQL in a temporary folder, which all processes of one
run (pytest-xdist's workers) share.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier

from ..embedded.membership import Membership
from ..errors import ConfigurationError, PulseTrioError
from ..migrate import migrate_sync
from ..postgres.dsn import redact
from .kept import keeping
from .virtual_time import give_clock, virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import pytest

A = TypeVar("A")
T = TypeVar("T")

_PREFIX = "pulse_test"
_CONNECT_WITHIN = 10
_DRIVER = re.compile(r"\w+\+\w+://")
_MEMORY = "/dev/shm"  # noqa: S108 -- the folder in it has a random name
_ROOM = 4 << 30
_SETTINGS = {"autovacuum": "off", "fsync": "off", "max_wal_size": "256MB"}
"""No autovacuum: a table that a test fills stays as the test left it. A log of 2 GB would be too much in memory."""
_DROP_TRIES, _DROP_PAUSE = 20, 0.1
_DAYS_TO_COME = """
  SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
  WHERE i.inhparent IN ('pulse.job_archive'::regclass, 'pulse.attempt'::regclass)
    AND c.relname ~ '_[0-9]{8}$' AND to_date(right(c.relname, 8), 'YYYYMMDD') > (now() AT TIME ZONE 'UTC')::date + 3
"""


class TemplateDatabases:
    """Makes databases whose names begin with `prefix`, which is the run's own. `server_dsn` may create databases."""

    def __init__(self, server_dsn: str, prefix: str, process: str) -> None:
        self.server_dsn = server_dsn
        self._prefix = prefix
        self._names = (f"{prefix}_{process}_{number}" for number in count(1))
        # One thread makes them, because one spare is enough; another drops them, so that none waits for a drop.
        self._maker = _Admin(server_dsn, "pulse-trio test databases")
        self._dropper = _Admin(server_dsn, "pulse-trio test databases' end")
        self._spares: dict[bool, Future[str]] = {}

    @contextmanager
    def migrated(self, *, clock: bool = False) -> Generator[str]:
        """The DSN of a new database with the schema; dropped afterwards, even if connections are left in it. With `clock` it is
        on virtual time (virtual_time.py)."""
        # Taken out first: a copy that failed fails one test, not all that follow.
        spare = self._spares.pop(clock, None)
        name = (spare or self._maker.submit(self._make, clock)).result()
        self._spares[clock] = self._maker.submit(self._make, clock)
        try:
            dsn = make_conninfo(self.server_dsn, dbname=name)
            with keeping(dsn):
                yield dsn
        finally:
            self._dropper.submit(_drop, name)

    def close(self) -> None:
        """Drops what is left, and waits for it."""
        while self._spares:
            _, spare = self._spares.popitem()
            # A copy that could not be made needs no dropping.
            with suppress(Exception):
                self._dropper.submit(_drop, spare.result())
        self._maker.shutdown()
        self._dropper.shutdown()

    def abandon(self) -> None:
        """Instead of `close`, when the interpreter ends and threads start no more: what is left is for `drop_databases`."""
        self._maker.abandon()
        self._dropper.abandon()

    def _make(self, connection: psycopg.Connection[Any], clock: bool) -> str:
        template = template_of(connection, self.server_dsn, self._prefix, clock=clock)
        name = next(self._names)
        copy_database(connection, template, name)
        return name


def _drop(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))


class _Admin:
    """A thread with a connection to the server, made when it is first needed."""

    def __init__(self, server_dsn: str, name: str) -> None:
        self._server_dsn = server_dsn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._connection: psycopg.Connection[Any] | None = None

    def submit(self, act: Callable[[psycopg.Connection[Any], A], T], given: A) -> Future[T]:
        """Calls `act` in the thread, with its connection."""
        return self._thread.submit(lambda: act(self._connected(), given))

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._server_dsn, autocommit=True, connect_timeout=_CONNECT_WITHIN)
        return self._connection

    def shutdown(self) -> None:
        """Waits until all is done."""
        self._thread.shutdown()
        self.abandon()

    def abandon(self) -> None:
        """Waits for nothing."""
        if self._connection is not None:
            self._connection.close()


def copy_database(admin: psycopg.Connection[Any], template: str, name: str) -> None:
    """Makes a database as a copy of a template, the way that costs the server least."""
    # PostgreSQL's default since 15 writes each page of the copy to its log; copying the files takes half of its time.
    how = SQL("STRATEGY file_copy" if admin.info.server_version >= 150000 else "")
    admin.execute(SQL("CREATE DATABASE {} TEMPLATE {} {}").format(Identifier(name), Identifier(template), how))


def template_of(admin: psycopg.Connection[Any], server_dsn: str, prefix: str, *, clock: bool = False) -> str:
    """The name of a run's migrated template (one with a clock of its own). The first process that asks creates it; the others
    wait for it."""
    name = f"{prefix}_clock" if clock else f"{prefix}_template"
    with admin.transaction():
        admin.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [name])
        if admin.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
            _make_template(server_dsn, name, clock=clock)
    return name


def _make_template(server_dsn: str, name: str, *, clock: bool) -> None:
    # Under another name until it is whole, so that a failed migration is not taken for a template.
    draft = f"{name}_draft"
    with psycopg.connect(server_dsn, autocommit=True, connect_timeout=_CONNECT_WITHIN) as other:
        other.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(draft)))
        other.execute(SQL("CREATE DATABASE {} TEMPLATE template0").format(Identifier(draft)))
        dsn = make_conninfo(server_dsn, dbname=draft)
        migrate_sync(dsn)
        with psycopg.connect(dsn, autocommit=True) as owner:
            _make_light(owner)
            if clock:
                give_clock(owner)
        other.execute(SQL("ALTER DATABASE {} RENAME TO {}").format(Identifier(draft), Identifier(name)))


def _make_light(owner: psycopg.Connection[Any]) -> None:
    """What costs each copy, and no test has a use for."""
    # What is due each hour is done here, or the first worker in each copy would do it.
    while owner.execute("SELECT pulse.upkeep('7 days')").fetchone() == (True,):
        pass
    # A run ends today or tomorrow, and `doctor` misses days within three. Each is a dozen files to copy, and tables to plan on.
    for (day,) in owner.execute(_DAYS_TO_COME).fetchall():
        owner.execute(SQL("DROP TABLE pulse.{}").format(Identifier(day)))


def drop_databases(server_dsn: str, prefix: str) -> None:
    """Drops what a run left on a server that outlives it: its template, and what killed processes left."""
    with psycopg.connect(server_dsn, autocommit=True, connect_timeout=_CONNECT_WITHIN) as admin:
        for _ in range(_DROP_TRIES):
            found = admin.execute("SELECT datname FROM pg_database WHERE starts_with(datname, %s)", [f"{prefix}_"])
            names = [name for (name,) in found.fetchall()]
            for name in names:
                # PostgreSQL refuses while another process of the run, which is ending, drops the same database or copies it.
                with suppress(psycopg.Error):
                    admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
            if not names:
                return
            time.sleep(_DROP_PAUSE)


# The run


def run_of(config: pytest.Config) -> tuple[str, str]:
    """What the processes of one run have in common (under pytest-xdist its id of the run), and the name of this one."""
    about = getattr(config, "workerinput", None)
    if about is None:
        return secrets.token_hex(6), "main"
    return str(about["testrunuid"])[:12], str(about["workerid"])


_VARIABLE = "PULSE_TRIO_TEST_DSN"


class NamedServer(NamedTuple):
    """A server that the user names, and where they do: the option, the configuration file or the environment."""

    dsn: str
    source: str


def named_server(config: pytest.Config) -> NamedServer | None:
    """The server that the user names, if they do. An empty name is none: for libpq it would be its default server."""
    if dsn := config.getoption("--pulse-dsn"):
        return NamedServer(str(dsn), "--pulse-dsn")
    if dsn := config.getini("pulse_dsn"):
        return NamedServer(str(dsn), "pulse_dsn in pytest's configuration:")
    return _of_environment()


def _of_environment() -> NamedServer | None:
    dsn = os.environ.get(_VARIABLE)
    return NamedServer(dsn, f"{_VARIABLE}:") if dsn else None


def folder_of(run: str) -> Path:
    """Where the embedded PostgreSQL of a run lives: in memory where there is enough, because copies of databases are made there
    in less than half of the time. Where TMPDIR is set, it is there. A short name: the paths of sockets are limited."""
    base = tempfile.gettempdir()
    with suppress(OSError, AttributeError):
        memory = os.statvfs(_MEMORY)
        # Its size, not what is free: all processes of a run must come to the same answer.
        if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and memory.f_blocks * memory.f_frsize >= _ROOM:
            base = _MEMORY
    return Path(base) / f"pulse-trio-{os.getuid()}-{run}"


@contextmanager
def open_databases(config: pytest.Config, server: str | None = None) -> Generator[TemplateDatabases]:
    """The run's databases, for one of its processes. `server` is what the fixture `pulse_server` gives. Raises
    `pytest.UsageError`, which says what to do, without a server."""
    run, process = run_of(config)
    named = named_server(config)
    if server:
        # Under pytest-xdist each process may have started a server of its own.
        named, run, process = NamedServer(server, "the fixture pulse_server:"), secrets.token_hex(6), "main"
    with ExitStack() as stack:
        if process == "main":
            stack.callback(_clean_up, named, run)
        try:
            server_dsn = stack.enter_context(_server(named, run))
        except ConfigurationError as error:
            import pytest

            raise pytest.UsageError(str(error)) from None
        databases = TemplateDatabases(server_dsn, f"{_PREFIX}_{run}", process)
        stack.callback(databases.close)
        yield databases


@contextmanager
def _server(named: NamedServer | None, run: str) -> Generator[str]:
    with ExitStack() as stack:
        if named is not None:
            with _told(f"{named.source} {_safe(named.dsn)}"):
                psycopg.connect(named.dsn, connect_timeout=_CONNECT_WITHIN).close()
            dsn = named.dsn
        else:
            folder = folder_of(run)
            with _told("the embedded PostgreSQL"):
                # Passable, because root runs PostgreSQL as another user.
                folder.mkdir(mode=0o711, exist_ok=True)
                # A run that is killed leaves nothing in memory: the server's keeper takes the folder away.
                membership = Membership.join(folder / "pg", _SETTINGS, remove=folder)
                stack.callback(membership.leave)
                dsn = membership.server.dsn
        yield dsn


def clean_up(config: pytest.Config, run: str) -> None:
    """Takes away what the processes of a run shared, once they have all ended."""
    _clean_up(named_server(config), run)


def _clean_up(named: NamedServer | None, run: str) -> None:
    if named is None:
        shutil.rmtree(folder_of(run), ignore_errors=True)
    else:
        with suppress(psycopg.Error):
            drop_databases(named.dsn, f"{_PREFIX}_{run}")


@contextmanager
def _told(what: str) -> Generator[None]:
    try:
        yield
    except (psycopg.Error, PulseTrioError, OSError) as error:
        raise ConfigurationError(
            f"pulse_dsn has no PostgreSQL: {what}: {redact(str(error).strip())}\n"
            "Name one (a role that may create databases) with --pulse-dsn or PULSE_TRIO_TEST_DSN, or install "
            "pulse-trio[embedded]."
        ) from None


def _safe(dsn: str) -> str:
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        if _DRIVER.match(dsn):
            return "(a URL of SQLAlchemy's: leave the driver out, as in postgresql://user@host/database)"
        return "(not a DSN)"
    return make_conninfo(**{key: str(value) for key, value in parts.items() if "password" not in key})


# Without pytest

_of_processes: dict[tuple[int, str | None], TemplateDatabases] = {}
"""By process id: a forked child has neither its parent's thread nor its parent's connection."""


@contextmanager
def pulse_database(server: str | None = None, *, clock: bool = False) -> Generator[str]:
    """The DSN of a new database with the schema, dropped afterwards: what the fixture `pulse_dsn` gives, for tests without
    pytest.

    `server` is the DSN of a role that may create databases (default: PULSE_TRIO_TEST_DSN, else an embedded PostgreSQL in a
    temporary folder, for as long as the process lives). With `clock` the database is for a `PulseClock`: while the block runs
    this process's clients and workers are on that clock. Raises `ConfigurationError`, which says what to do, without a server.
    """
    named = NamedServer(server, "pulse_database(server=)") if server else _of_environment()
    key = os.getpid(), named.dsn if named else None
    if key not in _of_processes:
        _of_processes[key] = _open_for_this_process(named)
    with _of_processes[key].migrated(clock=clock) as dsn, virtual_time() if clock else nullcontext():
        yield dsn


def _open_for_this_process(named: NamedServer | None) -> TemplateDatabases:
    run = secrets.token_hex(6)
    with ExitStack() as stack:
        if named is None:
            stack.callback(shutil.rmtree, folder_of(run), ignore_errors=True)
        dsn = stack.enter_context(_server(named, run))
        databases = TemplateDatabases(dsn, f"{_PREFIX}_{run}", "main")
        if named is not None:
            stack.callback(drop_databases, named.dsn, f"{_PREFIX}_{run}")
        stack.callback(databases.abandon)
        atexit.register(_close_in, os.getpid(), stack.pop_all())
    return databases


def _close_in(process: int, stack: ExitStack) -> None:
    # A forked child has its parent's atexit functions, and must not take the server from under it.
    if os.getpid() == process:
        # Somebody may have removed the temporary folder before, and the server's keeper has seen that.
        with suppress(ConfigurationError):
            stack.close()
