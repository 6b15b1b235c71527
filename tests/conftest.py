"""One PostgreSQL a run, one database a test. Under xdist the controller owns the server, and its workers share it."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

# `--import-mode=importlib` puts nothing on the path, and what tests share must be importable by them.
sys.path.insert(0, str(Path(__file__).parent))

from typing import TYPE_CHECKING, Any

from pulse_trio.testing.databases import drop_databases
from pulse_trio.testing.faults.processes import Processes, clean_environment, open_processes
from pulse_trio.testing.faults.proxy import Proxy, open_proxy
from support.collecting import has_mark, is_async_test
from support.databases import Databases, make_template
from support.forking import Forker, Scripts, open_forker, variables_of_start
from support.in_memory import temporary_files_in_memory
from support.prepared import find_imported, workers_are_forks
from support.scheduling import LongestFirst, Notes, longest_first
from support.server import open_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence
    from contextlib import AbstractContextManager

SERVER = pytest.StashKey["RunServer"]()
VARIABLES = pytest.StashKey[dict[str, str]]()
NEW_OBJECTS = 10_000
"""After which Python looks for garbage."""


class RunServer:
    """The run's server, started when it is first asked for, and the prefix of the run's databases on it."""

    def __init__(self) -> None:
        self.prefix = f"pulse_trio_{secrets.token_hex(4)}"
        self.origin: str | None = None
        self._dsn: str | None = None
        self._open = ExitStack()

    def dsn(self) -> str:
        if self._dsn is None:
            server = self._open.enter_context(open_server())
            self._dsn, self.origin = server.dsn, server.origin
            self._open.callback(drop_databases, server.dsn, self.prefix)
            make_template(server.dsn, self.prefix)
        return self._dsn

    def enter(self, block: AbstractContextManager[None]) -> None:
        """Leaves the block when the server is closed."""
        self._open.enter_context(block)

    def close(self) -> None:
        self._open.close()


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--note-durations", action="store_true", help="keep how long each test took, for the order of later runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    find_imported()
    config.stash[VARIABLES] = variables_of_start(os.environ)
    if not is_worker(config):
        config.stash[SERVER] = RunServer()
        config.stash[SERVER].enter(temporary_files_in_memory())
        if config.getoption("note_durations"):
            config.pluginmanager.register(Notes())


def pytest_unconfigure(config: pytest.Config) -> None:
    if SERVER in config.stash:
        config.stash[SERVER].close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """xdist's: runs in the controller before it starts the workers. The server is started while the tests are imported."""
    server = config.stash[SERVER]
    server.enter(workers_are_forks(config, specs))
    server.dsn()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """xdist's: runs in the controller for each worker before it starts."""
    server = node.config.stash[SERVER]  # type: ignore[attr-defined]
    node.workerinput["pulse_trio_server"] = (server.dsn(), server.prefix)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if SERVER in config.stash and config.stash[SERVER].origin is not None:
        terminalreporter.write_line(f"PostgreSQL: {config.stash[SERVER].origin}")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Async tests run under pytest-trio; those that say `pytest.mark.anyio` run on asyncio too, under anyio's plugin."""
    if is_async_test(collector, name, obj) and not has_mark(collector, obj, "trio", "anyio"):
        pytest.mark.trio(obj)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    """xdist's: who runs which test under `--dist loadscope`."""
    return LongestFirst(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays until the end of the run, so the collector of garbage leaves it alone: each process of xdist
    collects all tests, and scanned them over and over while it did, and again in the tests. There it looks ten times less
    often than Python's default: that was a twentieth of the CPU of these processes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """The order, when all plugins have said which tests are run."""
    yield
    if is_worker(config):
        longest_first(items)
    refuse_half_marked(items)


def refuse_half_marked(items: list[pytest.Item]) -> None:
    """A test that shall run on asyncio too and is not marked so would run on Trio alone, and pass."""
    for item in items:
        if item.get_closest_marker("trio") and (
            hasattr(getattr(item, "module", None), "anyio_backend")
            or "anyio_backend" in getattr(item, "fixturenames", ())
        ):
            raise pytest.UsageError(f"{item.nodeid} uses anyio_backend: mark it pytest.mark.anyio")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forgets a Trio run that pytest-timeout left in the middle: Trio would refuse the run of every later test here."""
    if trio.lowlevel.in_trio_run():
        trio._core._run.GLOBAL_RUN_CONTEXT.__dict__.clear()
        signal.set_wakeup_fd(-1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """A test that leaves a variable of Python's own start behind makes the forker refuse every later command of its process:
    each is then started as a program of its own, for ten times the CPU. One such test cost 80 s a run."""
    yield
    before, after = item.config.stash[VARIABLES], variables_of_start(os.environ)
    item.config.stash[VARIABLES] = after
    assert before == after, f"the test left variables behind: {before} became {after}"


@pytest.fixture(scope="session")
def databases(request: pytest.FixtureRequest) -> Generator[Databases]:
    """Makes databases on the run's server, for tests that need more than one."""
    config = request.config
    if is_worker(config):
        told: dict[str, Any] = vars(config)["workerinput"]  # xdist's
        (dsn, prefix), worker = told["pulse_trio_server"], told["workerid"]
    else:
        dsn, prefix, worker = config.stash[SERVER].dsn(), config.stash[SERVER].prefix, "main"
    databases = Databases(dsn, prefix, worker)
    yield databases
    databases.close()


@pytest.fixture(scope="session")
def server_dsn(databases: Databases) -> str:
    """The run's server, as a superuser, in a database that no test may change."""
    return databases.server_dsn


@pytest.fixture
def dsn(databases: Databases) -> Generator[str]:
    """A database of the test's own, with the schema `pulse` in it."""
    with databases.migrated() as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(databases: Databases) -> Generator[str]:
    """A database of the test's own, without the schema."""
    with databases.empty() as dsn:
        yield dsn


@pytest.fixture
async def proxy(dsn: str) -> AsyncGenerator[Proxy]:
    """A network of the test's own to break: `proxy.dsn` is `dsn` through it."""
    async with open_proxy(dsn) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def forker() -> Generator[Forker]:
    with open_forker(clean_environment()) as forker:
        yield forker


@pytest.fixture(scope="session")
def forker_of_pytest() -> Generator[Forker]:
    """Starts runs of pytest in copies of a process that has imported its plugins."""
    own = {name: value for name, value in clean_environment().items() if not name.startswith(("PYTEST", "COV_"))}
    with open_forker(own, "pytest") as forker:
        yield forker


@pytest.fixture
async def processes(tmp_path: Path, forker: Forker) -> AsyncGenerator[Processes]:
    """Starts real processes, in `tmp_path`; whatever still runs at the end of the test is killed."""
    async with open_processes(tmp_path, forker) as processes:
        yield processes


@pytest.fixture
def forked_children(forker: Forker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that workers in the test's own process start for their handlers are forks."""
    monkeypatch.setattr(trio.lowlevel, "open_process", forker.opens_children())


@pytest.fixture
async def scripts(tmp_path: Path, forker: Forker) -> AsyncGenerator[Processes]:
    """Its `command` runs a script of Python, in `tmp_path`, in a process that has imported pulse-trio already."""
    async with open_processes(tmp_path, Scripts(forker)) as processes:
        yield processes
