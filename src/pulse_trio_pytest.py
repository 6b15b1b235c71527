"""pytest's way to the fixtures of `pulse_trio.testing`: nothing of pulse-trio is imported before a test asks for one of them.

Installed with pulse-trio, and loaded by every pytest run where that is. So this file stands outside of the package, whose
import would cost such a run half a second, and registers functions only.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pulse_trio import Client, Handlers, SyncClient
    from pulse_trio.testing import PulseClock, PulseWorker
    from pulse_trio.testing.databases import TemplateDatabases

_RUN = pytest.StashKey[str]()
_DSN = """PostgreSQL for the fixture pulse_dsn, as a role that may create databases (default: PULSE_TRIO_TEST_DSN, else an
embedded PostgreSQL in a temporary folder). Each test gets a database of its own, which is dropped afterwards."""

_RUNNERS = ("trio", "anyio", "asyncio")
"""The marks of the plugins that run coroutines; in their automatic modes they set them themselves."""
_UNMARKED = """pulse_client needs an event loop, and no plugin runs this test in one. Mark it with @pytest.mark.trio, or write
trio_mode = true into pytest's configuration, which does so for every async test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--pulse-dsn`, and the same in pytest's configuration file."""
    group = parser.getgroup("pulse-trio")
    group.addoption("--pulse-dsn", metavar="DSN", default=None, help=_DSN.replace("\n", " "))
    parser.addini("pulse_dsn", _DSN.replace("\n", " "))
    parser.addini("pulse_handlers", "The handlers that pulse_worker runs, as in app:handlers.")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's, in the controller, for each of its workers."""
    node.config.stash[_RUN] = str(node.workerinput["testrunuid"])[:12]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Under pytest-xdist the controller takes away what its workers shared."""
    if _RUN in config.stash and (_named(config) or any(at.exists() for at in _folders_of(config.stash[_RUN]))):
        from pulse_trio.testing.databases import clean_up

        clean_up(config, config.stash[_RUN])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test fails here that nothing would run. pytest itself fails it only after it has taken fixtures, and each test after
    it with an AssertionError that names no cause."""
    fixtures: Any = getattr(item, "fixturenames", ())
    if (
        "pulse_client" in fixtures
        and "anyio_backend" not in fixtures
        and inspect.iscoroutinefunction(getattr(item, "function", None))
        and not any(item.get_closest_marker(mark) for mark in _RUNNERS)
    ):
        pytest.fail(_UNMARKED, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test fails whose `assert_enqueued(...)` on a `Client` was not awaited, or that has not looped over its
    `crash_points(...)`: it has asserted nothing."""
    try:
        result = yield
    except BaseException as error:
        for said in _forgotten():
            error.add_note(said)
        raise
    if forgotten := _forgotten():
        pytest.fail("\n".join(forgotten), pytrace=False)
    return result


def _forgotten() -> list[str]:
    asked = sys.modules.get("pulse_trio.testing.forgotten")
    return asked.forgotten() if asked is not None else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure in the body of `async for run in crash_points(...)` says at which point."""
    noting = sys.modules.get("pulse_trio.testing.crashing.noting")
    if noting is not None and call.excinfo is not None:
        noting.explain(call.excinfo.value)
    if noting is not None and call.when == "teardown":
        noting.forget()
    return (yield)


def _named(config: pytest.Config) -> object:
    return config.getoption("--pulse-dsn") or config.getini("pulse_dsn") or os.environ.get("PULSE_TRIO_TEST_DSN")


def _folders_of(run: str) -> list[Path]:
    # In memory, or not: see folder_of() in testing/databases.py, which this file must not import.
    bases = ("/dev/shm", tempfile.gettempdir())  # noqa: S108 -- the folder in it has a random name
    return [Path(base) / f"pulse-trio-{os.getuid()}-{run}" for base in bases]


@pytest.fixture(scope="session")
def pulse_server() -> str | None:
    """The DSN of the PostgreSQL on which the tests' databases are made, as a role that may create databases. Override it in
    your conftest.py to start one, as with testcontainers. None, as here: the option `--pulse-dsn` decides."""
    return None


@pytest.fixture(scope="session")
def pulse_databases(request: pytest.FixtureRequest, pulse_server: str | None) -> Generator[TemplateDatabases]:
    """Makes databases with the schema, as copies of one; for tests that need more than one. `with pulse_databases.migrated() as
    dsn`."""
    from pulse_trio.testing.databases import open_databases

    with open_databases(request.config, pulse_server) as databases:
        yield databases


@pytest.fixture
def pulse_dsn(request: pytest.FixtureRequest, pulse_databases: TemplateDatabases) -> Generator[str]:
    """The DSN of a database of the test's own, with the schema `pulse` in it and nothing else. Dropped after the test."""
    if "pulse_clock" in request.fixturenames:
        from pulse_trio.testing.virtual_time import virtual_time

        with pulse_databases.migrated(clock=True) as dsn, virtual_time():
            yield dsn
    else:
        with pulse_databases.migrated() as dsn:
            yield dsn


@pytest.fixture
def pulse_handlers(request: pytest.FixtureRequest) -> Handlers:
    """The handlers that `pulse_worker` runs: those of the option `pulse_handlers` in pytest's configuration. Override it in
    your conftest.py to give others."""
    from pulse_trio.testing.handlers import configured_handlers

    return configured_handlers(request.config)


def _clock_of_trio() -> object:
    """The clock of the Trio run that this is called in; None on another loop."""
    import trio

    try:
        return trio.lowlevel.current_clock()
    except RuntimeError:
        return None


@pytest.fixture
async def pulse_client(pulse_dsn: str, pulse_handlers: Any) -> AsyncGenerator[Client]:
    """A `Client` on the test's database, for tests under pytest-trio or anyio's plugin."""
    from pulse_trio import ConfigurationError, open_client

    clock = _clock_of_trio()
    if clock is not None and getattr(clock, "autojump_threshold", math.inf) < math.inf:
        raise ConfigurationError(
            "pulse_client talks to PostgreSQL, so it needs real time: use pulse_clock, not autojump_clock."
        )
    async with open_client(pulse_dsn, handlers=pulse_handlers) as client:
        yield client


@pytest.fixture
def pulse_sync_client(pulse_dsn: str, pulse_handlers: Any) -> SyncClient:
    """A `SyncClient` on the test's database, for tests without an event loop."""
    from pulse_trio import SyncClient

    return SyncClient(pulse_dsn, handlers=pulse_handlers)


@pytest.fixture
def pulse_clock(pulse_dsn: str, pulse_handlers: Any) -> PulseClock:
    """Virtual time for the test's database: `await pulse_clock.advance(hours=1)`. Nothing waits: `pulse_worker.drain()` moves
    the clock on until no job waits for its time."""
    from pulse_trio.testing import PulseClock

    return PulseClock(pulse_dsn, pulse_handlers)


@pytest.fixture
def pulse_worker(request: pytest.FixtureRequest, pulse_dsn: str, pulse_handlers: Any) -> PulseWorker:
    """Runs the due jobs of the test's database: `await pulse_worker.drain()`, or `pulse_worker.drain_sync()`."""
    from pulse_trio.testing import PulseWorker

    clock = request.getfixturevalue("pulse_clock") if "pulse_clock" in request.fixturenames else None
    return PulseWorker(pulse_dsn, pulse_handlers, clock=clock)
