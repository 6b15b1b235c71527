"""The testing kit as users have it: their own project, tested by a pytest of its own."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier, Literal

from pulse_trio.errors import ConfigurationError
from pulse_trio.testing import pulse_database
from pulse_trio.testing.databases import _of_environment
from support.forking import completed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from support.forking import Forker

Project = "Callable[..., subprocess.CompletedProcess[str]]"

APP = """
import trio

from pulse_trio import Handlers, Job, RetryAfter

handlers = Handlers()


@handlers.job(queue="mail", max_attempts=3)
async def welcome(name: str, template: str = "plain") -> str:
    return f"welcome, {name}"


@handlers.job(max_attempts=3)
async def flaky(job: Job) -> int:
    if job.attempt == 1:
        raise RetryAfter(3600)
    return job.attempt


@handlers.job(runs="thread")
def count(words: list[str]) -> int:
    return len(words)


@handlers.job
async def forever() -> None:
    await trio.sleep_forever()


async def sign_up(client, name):
    return await client.enqueue(welcome, name, template="vip")
"""
CONFIGURATION = """
[tool.pytest.ini_options]
pulse_handlers = "app:handlers"
anyio_mode = "strict"
filterwarnings = ["error"]
"""
HEAD = """
import pytest
from app import count, flaky, forever, handlers, sign_up, welcome
from pulse_trio.testing import assert_enqueued, enqueued, refute_enqueued
"""
INSTALLED = any(found.value == "pulse_trio_pytest" for found in entry_points(group="pytest11"))


@pytest.fixture
def creator_dsn(server_dsn: str) -> Generator[str]:
    """The server as a new user who may create databases: other tests of the kit use the server at the same time."""
    name, password = f"pulse_kit_{secrets.token_hex(6)}", secrets.token_hex(12)
    with psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(SQL("CREATE ROLE {} LOGIN CREATEDB PASSWORD {}").format(Identifier(name), Literal(password)))
        try:
            yield make_conninfo(server_dsn, user=name, password=password)
        finally:
            admin.execute(SQL("DROP ROLE {}").format(Identifier(name)))


@pytest.fixture
def project(
    tmp_path: Path, server_dsn: str, forker_of_pytest: Forker
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a user's tests in a project of theirs, on the server of this run, by a pytest in a process of its own."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "pyproject.toml").write_text(CONFIGURATION)

    def run(tests: str, *arguments: str, dsn: str | None = server_dsn) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_app.py").write_text(HEAD + tests)
        command = ["-q", "-rA", "-p", "no:cacheprovider", *arguments]
        # An environment that was made before the plugin existed knows nothing of it.
        command += [] if INSTALLED else ["-p", "pulse_trio_pytest"]
        command += [] if dsn is None else ["--pulse-dsn", dsn]
        own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PULSE_TRIO", "COV_"))}

        async def ended() -> tuple[int, str, str]:
            return await completed(await forker_of_pytest.start(command, own | {"PYTHONPATH": str(tmp_path)}, tmp_path))

        return subprocess.CompletedProcess(["pytest", *command], *trio.run(ended))

    return run


def outcomes(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr


def left_behind(dsn: str) -> list[str]:
    """The databases that this user still owns."""
    with psycopg.connect(dsn) as connection:
        query = "SELECT datname FROM pg_database WHERE pg_get_userbyid(datdba) = current_user"
        return [name for (name,) in connection.execute(query)]


THREE_LOOPS = """
@pytest.mark.trio
async def test_on_trio(pulse_client, pulse_worker):
    ref = await sign_up(pulse_client, "Ada")
    job = await assert_enqueued(pulse_client, welcome, args={"name": "Ada"}, queue="mail")
    assert job.id == ref.id
    await refute_enqueued(pulse_client, welcome, args={"name": "Bob"})
    assert (await pulse_worker.drain()).ended == {"completed": 1}
    assert await ref.result() == "welcome, Ada"
    assert await enqueued(pulse_client) == []
    assert len(await enqueued(pulse_client, welcome, state="completed")) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_on_both(anyio_backend, pulse_client, pulse_worker):
    ref = await sign_up(pulse_client, "Ada")
    await pulse_client.enqueue(count, ["a", "b"])
    await assert_enqueued(pulse_client, welcome, count=1)
    assert (await pulse_worker.drain()).ended == {"completed": 2}
    assert await ref.result() == "welcome, Ada"


def test_without_a_loop(pulse_sync_client, pulse_worker):
    pulse_sync_client.enqueue(flaky)
    assert assert_enqueued(pulse_sync_client, "flaky", args={}).kind == "flaky"
    assert pulse_worker.drain_sync().ended == {"failed": 1}
    (waiting,) = enqueued(pulse_sync_client, flaky, state="retryable")
    assert waiting.attempt == 1
    assert assert_enqueued(pulse_sync_client, flaky) == waiting


@pytest.mark.trio
@pytest.mark.parametrize("number", range(3))
async def test_each_has_a_database_of_its_own(number, pulse_client):
    assert await enqueued(pulse_client) == []
    await sign_up(pulse_client, str(number))
    await assert_enqueued(pulse_client, count=1, args={"name": str(number)})


@pytest.mark.trio
async def test_in_the_transaction_of_the_test(pulse_client, pulse_dsn):
    from pulse_trio.postgres import TrioConnection

    async with await TrioConnection.connect(pulse_dsn) as connection:
        inside = pulse_client.using(connection)
        await sign_up(inside, "Ada")
        await assert_enqueued(inside, welcome)
        await refute_enqueued(pulse_client, welcome)
        await connection.rollback()
        await refute_enqueued(inside, welcome)
"""


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_users_tests_pass_on_trio_on_asyncio_and_without_a_loop(
    project: Callable[..., subprocess.CompletedProcess[str]], creator_dsn: str, arguments: list[str]
) -> None:
    done = project(THREE_LOOPS, *arguments, dsn=creator_dsn)
    assert "8 passed" in outcomes(done), done.stdout + done.stderr
    assert left_behind(creator_dsn) == []


def test_without_a_server_of_yours_there_is_an_embedded_one_which_goes_with_the_run(
    project: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "t"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for parent in folder.parents:
        if os.stat(parent).st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    monkeypatch.setenv("TMPDIR", str(folder))
    done = project(THREE_LOOPS, "-n", "2", dsn=None)
    assert "8 passed" in outcomes(done), done.stdout + done.stderr
    assert list(folder.glob("pulse-trio-*")) == []


WHERE = """
def test_where(pulse_dsn):
    from psycopg.conninfo import conninfo_to_dict

    print("in", conninfo_to_dict(pulse_dsn)["host"])
"""


def test_the_embedded_server_of_a_run_is_in_memory_where_there_is_room_and_nothing_is_left_of_it(
    project: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    done = project(WHERE, dsn=None)
    assert "1 passed" in outcomes(done), done.stdout + done.stderr
    (folder,) = [Path(line.removeprefix("in ")) for line in done.stdout.splitlines() if line.startswith("in ")]
    at = Path("/dev/shm")  # noqa: S108 -- the folder in it has a random name
    memory = os.statvfs(at)
    assert folder.is_relative_to(at) == (memory.f_blocks * memory.f_frsize >= 4 << 30)
    (own,) = [parent for parent in (folder, *folder.parents) if parent.name.startswith("pulse-trio-")]
    assert not own.exists()


KILLED = """
import signal
from pulse_trio.testing import pulse_database

with pulse_database() as dsn:
    print(dsn, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_nothing_of_its_embedded_server(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """76 MB stayed in memory each time."""
    monkeypatch.delenv("PULSE_TRIO_TEST_DSN", raising=False)
    folder = tmp_path / "t"
    folder.mkdir(mode=0o777)
    for parent in (folder, *folder.parents):
        if os.stat(parent).st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, env=environment) as begun:
        try:
            assert begun.stdout is not None
            assert begun.stdout.readline().startswith(b"user=")
            (keeper,) = folder.glob("pulse-trio-*/pg/locks/keeper")
            with keeper.open("rb") as held:
                begun.send_signal(number)
                assert begun.wait(30) == -number
                fcntl.flock(held, fcntl.LOCK_SH)  # until the keeper has ended
        finally:
            begun.kill()
    assert list(folder.glob("*")) == []


OWN_SERVER = """
@pytest.fixture(scope="session")
def pulse_server(worker_id):
    return SERVER


def test_there(pulse_dsn, pulse_sync_client, pulse_worker):
    pulse_sync_client.enqueue(welcome, "Ada")
    assert pulse_worker.drain_sync().ended == {"completed": 1}
    assert conninfo_to_dict(pulse_dsn)["user"] == conninfo_to_dict(SERVER)["user"]


def test_and_another(pulse_dsn):
    pass
"""


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_fixture_of_the_users_may_start_the_server(
    project: Callable[..., subprocess.CompletedProcess[str]], creator_dsn: str, arguments: list[str]
) -> None:
    given = f"from psycopg.conninfo import conninfo_to_dict\nSERVER = {creator_dsn!r}\n"
    done = project(given + OWN_SERVER, *arguments, dsn="host=127.0.0.1 port=1")
    assert "2 passed" in outcomes(done), done.stdout + done.stderr
    assert left_behind(creator_dsn) == []


def test_a_url_of_sqlalchemys_is_told_to_leave_the_driver_out(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = project(WHERE, dsn="postgresql+psycopg2://me:hunter22@localhost/db")
    assert "leave the driver out" in done.stdout
    assert "hunter22" not in done.stdout + done.stderr


FAILING = """
@pytest.mark.trio
async def test_nearest(pulse_client):
    await sign_up(pulse_client, "Ada")
    await pulse_client.enqueue(count, ["a"])
    await assert_enqueued(pulse_client, welcome, args={"name": "Ada", "template": "plain"}, queue="post")


@pytest.mark.trio
async def test_nothing(pulse_client):
    await assert_enqueued(pulse_client, welcome)


@pytest.mark.trio
async def test_too_many(pulse_client):
    await sign_up(pulse_client, "Ada")
    await sign_up(pulse_client, "Bob")
    await assert_enqueued(pulse_client, welcome, count=1)


@pytest.mark.trio
async def test_refuted(pulse_client):
    await sign_up(pulse_client, "Ada")
    await refute_enqueued(pulse_client, welcome, args={"name": "Ada"})


@pytest.mark.trio
async def test_no_such_field(pulse_client):
    await assert_enqueued(pulse_client, welcome, arguments={"name": "Ada"})


@pytest.mark.trio
async def test_that_never_ends(pulse_client, pulse_worker):
    await pulse_client.enqueue(forever)
    await pulse_worker.drain(timeout=1)
"""


def test_a_message_shows_the_nearest_job_and_the_difference(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = project(FAILING)
    said = re.sub(r"job \d+", "job N", done.stdout)
    assert "6 failed" in outcomes(done), said
    for line in (
        "expected a job of kind 'welcome', args={'name': 'Ada', 'template': 'plain'}, queue='post'; there is none among 2",
        "  job N (welcome, available, queue 'mail') {'name': 'Ada', 'template': 'vip'}",
        "    args['template']: 'vip', not 'plain'",
        "    queue: 'mail', not 'post'",
        "expected a job of kind 'welcome'; there is none: nothing was enqueued",
        "expected 1 times a job of kind 'welcome'; found 2:",
        "expected no job of kind 'welcome', args={'name': 'Ada'}; found 1:",
        "a job has no arguments to expect: there are args, at, key,",
        "drain() did not end within 1 s: job N (forever) still ran. Does that handler end?",
    ):
        assert line in said, line


WRONGLY_REFUTED = """
def _refuted(client, handler, **expected):
    with pytest.raises(AssertionError, match="expected no job"):
        refute_enqueued(client, handler, **expected)


def test_a_tuple(pulse_sync_client):
    pulse_sync_client.enqueue(count, ["a", "b"])
    _refuted(pulse_sync_client, count, args={"words": ("a", "b")})


def test_a_key_that_is_a_number(pulse_sync_client):
    pulse_sync_client.enqueue(table, {1: "one"})
    _refuted(pulse_sync_client, table, args={"rows": {1: "one"}})


def test_a_default(pulse_sync_client):
    pulse_sync_client.enqueue(welcome, "Ada")
    _refuted(pulse_sync_client, welcome, args={"name": "Ada", "template": "plain"})
    refute_enqueued(pulse_sync_client, welcome, args={"name": "Ada", "template": "vip"})


def test_a_truth_is_no_number(pulse_sync_client):
    pulse_sync_client.enqueue(table, {1: 1})
    _refuted(pulse_sync_client, table, args={"rows": {1: 1}})
    refute_enqueued(pulse_sync_client, table, args={"rows": {1: True}})


def test_the_options_of_a_handler_are_asked_for(pulse_sync_client):
    at = datetime(2031, 1, 1, tzinfo=timezone.utc)
    given = [{"queue": "b"}, {"priority": 3}, {"unique_key": "u"}, {"key": "k"}, {"max_attempts": 9}, {"at": at}]
    given += [{"tags": ["eu", "vip"]}, {"meta": {"order": 7, "vip": True}}]
    for options in given:
        asked = welcome.options(**options)
        with pytest.raises(AssertionError):
            assert_enqueued(pulse_sync_client, asked)
        job = pulse_sync_client.enqueue(asked, "Ada")
        _refuted(pulse_sync_client, asked)
        assert assert_enqueued(pulse_sync_client, asked, count=1).id == job.id
    chained = welcome.options(queue="b").options(priority=3)
    refute_enqueued(pulse_sync_client, chained)
    # What the handler itself says is not asked for, and not what is None.
    assert_enqueued(pulse_sync_client, welcome.options(queue=None), count=len(given))


def test_a_number_is_the_same_with_a_fraction_of_zero(pulse_sync_client):
    pulse_sync_client.enqueue(add, 1, 2)
    _refuted(pulse_sync_client, add, args={"one": 1.0, "other": 2})


def test_a_kind_that_the_registry_lacks(pulse_sync_client, pulse_dsn):
    for check in (assert_enqueued, refute_enqueued, enqueued):
        with pytest.raises(UnknownKind, match="Did you mean 'welcome'"):
            check(pulse_sync_client, "welcom")
    # Whoever has no registry does not know, and what is there is no mistake.
    refute_enqueued(SyncClient(pulse_dsn), "welcom")
    SyncClient(pulse_dsn).enqueue("welcom")
    _refuted(pulse_sync_client, "welcom")


def undecorated():
    pass


@pytest.mark.parametrize(
    ("handler", "expected", "said"),
    [
        (undecorated, {}, "a function under @handlers.job"),
        (welcome, {"state": "complete"}, 'state= takes .*completed.* or "any", got .complete.'),
        (welcome, {"args": {"named": "Ada"}}, "'welcome' has no argument 'named': there are 'name', 'template'"),
        (welcome, {"args": ["Ada"]}, "args= takes a mapping of arguments by name, got"),
        (welcome, {"args": {"name": object()}}, "args= cannot be written as JSON"),
        (welcome, {"at": datetime(2030, 1, 1)}, "at= takes an aware datetime"),
        (welcome, {"priority": "high"}, "priority= takes a whole number"),
        (welcome, {"args": {"name": 7}}, "no job of 'welcome' has args={'name': 7}: Expected `str`, got `int` for 'name'"),
        ("welcome", {"args": {"name": 7}}, "no job of 'welcome' has args={'name': 7}: Expected `str`, got `int` for 'name'"),
        ("welcome", {"args": {"named": "Ada"}}, "'welcome' has no argument 'named': there are 'name', 'template'"),
        (count, {"args": {"words": ["a", 1]}}, "Expected `str`, got `int`"),
        (welcome.options(delay=60), {}, r"welcome.options\\(delay=...\\): .* not compared here, only at, key, max_attempts, "),
        (welcome.options(timeout=9), {}, r"welcome.options\\(timeout=...\\): .* Leave it out, and look at the job"),
        (welcome, {"tags": "eu"}, "tags= takes a list of text, or None, got 'eu'"),
        (welcome, {"tags": ["of two"]}, "A tag must have no spaces"),
        (welcome, {"meta": {"order": [7]}}, "meta"),
        (welcome, {"queue": "a b"}, "Queue name .a b. is not valid"),
        (welcome, {"priority": 2**40}, "priority must be a whole number"),
        (welcome, {"priority": True}, "priority must be a whole number"),
        (welcome, {"max_attempts": 0}, "max_attempts must be a whole number from 1"),
        (welcome, {"unique_key": ""}, "unique_key"),
        (welcome.options(queue="a"), {"queue": "b"}, r"queue='b' and welcome.options\\(queue='a'\\): no job has both"),
    ],
)
@pytest.mark.parametrize("check", [assert_enqueued, refute_enqueued, enqueued])
def test_what_no_job_can_have(pulse_sync_client, check, handler, expected, said):
    pulse_sync_client.enqueue(welcome, "Ada")
    with pytest.raises(TypeError, match=said):
        check(pulse_sync_client, handler, **expected)
"""


def test_arguments_are_compared_as_json_with_defaults_and_what_no_job_can_have_is_refused(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    more = """
from datetime import datetime, timezone
from typing import Any

from pulse_trio import SyncClient, UnknownKind


@handlers.job
async def table(rows: dict[int, Any]) -> None:
    pass


@handlers.job
async def add(one: int, other: float) -> None:
    pass
"""
    done = project(more + WRONGLY_REFUTED)
    assert "73 passed" in outcomes(done), done.stdout + done.stderr


NOT_AWAITED = """
@pytest.mark.trio
async def test_assert(pulse_client):
    assert_enqueued(pulse_client, welcome)


@pytest.mark.trio
async def test_refute(pulse_client):
    await sign_up(pulse_client, "Ada")
    refute_enqueued(pulse_client, welcome)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_enqueued(anyio_backend, pulse_client):
    assert enqueued(pulse_client, welcome)


@pytest.mark.trio
async def test_a_failure_of_its_own(pulse_client):
    assert_enqueued(pulse_client, welcome)
    raise ValueError("its own")


@pytest.mark.trio
async def test_that_awaits(pulse_client):
    asked = refute_enqueued(pulse_client, welcome)
    await asked
"""


def test_a_test_fails_whose_assertion_was_not_awaited(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = project(NOT_AWAITED)
    assert "4 failed, 1 passed" in outcomes(done), done.stdout + done.stderr
    assert "assert_enqueued(...) was not awaited, test_app.py:8" in done.stdout
    assert "refute_enqueued(...) was not awaited, test_app.py:14" in done.stdout
    assert "\nenqueued(...) was not awaited, test_app.py:20" in done.stdout
    assert "ValueError: its own" in done.stdout
    assert "never awaited" not in done.stdout


NOT_LOOPED_OVER = """
from pulse_trio.testing import crash_points


@pytest.mark.trio
async def test_forgets():
    crash_points(welcome, "Ada")


def test_forgets_without_a_loop():
    assert crash_points(welcome, "Ada", only="kill@start")


@pytest.mark.trio
async def test_a_failure_of_its_own():
    crash_points(welcome, "Ada")
    raise ValueError("its own")


@pytest.mark.trio
async def test_that_breaks():
    async for run in crash_points(welcome, "Ada"):
        break


@pytest.mark.trio
async def test_that_loops():
    async for run in crash_points(welcome, "Ada"):
        assert run.state == "completed"


@pytest.mark.trio
async def test_that_is_refused():
    with pytest.raises(TypeError):
        crash_points(welcome, "Ada", nothing=1)
"""


def test_a_test_fails_that_does_not_loop_over_its_crash_points(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """It passed, and no handler had run."""
    done = project(NOT_LOOPED_OVER)
    assert "3 failed, 3 passed" in outcomes(done), done.stdout + done.stderr
    for line in (11, 15, 20):
        assert f"crash_points(...) was not looped over (async for run in ...), test_app.py:{line}" in done.stdout


NOT_MARKED = """
async def test_without_a_mark(pulse_client):
    await sign_up(pulse_client, "Ada")


@pytest.mark.trio
async def test_after_it(pulse_client):
    await sign_up(pulse_client, "Ada")
    await assert_enqueued(pulse_client, welcome)
"""


def test_an_async_test_without_a_mark_says_which_it_needs_and_fails_no_other(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """pytest itself fails each later test that asks for the same fixture, with an AssertionError that has no text."""
    done = project(NOT_MARKED)
    assert "1 passed, 1 error" in outcomes(done), done.stdout + done.stderr
    assert "Mark it with @pytest.mark.trio" in done.stdout
    assert "2 passed" in outcomes(project(NOT_MARKED, "-o", "trio_mode=true"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--pulse-dsn", "host=127.0.0.1 port=1 password=hush"],
            "pulse_dsn has no PostgreSQL: --pulse-dsn host=127.0.0.1 port=1:",
        ),
        (["--pulse-dsn", "no dsn at all"], "pulse_dsn has no PostgreSQL: --pulse-dsn (not a DSN):"),
        (
            ["-o", "pulse_dsn=host=127.0.0.1 port=1 password=hush"],
            "pulse_dsn has no PostgreSQL: pulse_dsn in pytest's configuration: host=127.0.0.1 port=1:",
        ),
        (["-o", "pulse_handlers="], "No handlers are known: set pulse_handlers"),
        (["-o", "pulse_handlers=app:nothing"], "pulse_handlers = 'app:nothing': The module 'app'"),
    ],
)
def test_what_is_missing_is_named_within_seconds(
    project: Callable[..., subprocess.CompletedProcess[str]], server_dsn: str, arguments: list[str], said: str
) -> None:
    named = None if "port=1" in arguments[1] or "--pulse-dsn" in arguments else server_dsn
    done = project(THREE_LOOPS, "-k", "without_a_loop", *arguments, dsn=named)
    assert done.returncode == 1
    assert said in done.stdout
    assert "hush" not in done.stdout.partition("short test summary")[2]


def test_an_empty_variable_names_no_server_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_TRIO_TEST_DSN", "")
    assert _of_environment() is None
    monkeypatch.setenv("PULSE_TRIO_TEST_DSN", "host=127.0.0.1 port=1")
    with (
        pytest.raises(ConfigurationError, match=r"no PostgreSQL: PULSE_TRIO_TEST_DSN: host=127\.0\.0\.1"),
        pulse_database(),
    ):
        pass


FORKING = """
import os, sys
from pulse_trio.testing import pulse_database

with pulse_database(sys.argv[1]) as dsn:
    child = os.fork()
    if not child:
        with pulse_database(sys.argv[1]) as own:
            same = own == dsn
        sys.exit(same)  # and so with the functions of atexit
    assert os.waitpid(child, 0)[1] == 0
with pulse_database(sys.argv[1]):
    print("still there")
"""


def test_a_forked_child_has_databases_of_its_own(creator_dsn: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, creator_dsn]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "still there\n", done.stderr


def test_a_suite_that_uses_none_of_it_imports_none_of_it(
    project: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text("count = flaky = forever = handlers = sign_up = welcome = None")
    tests = "import sys\ndef test_nothing():\n    assert 'pulse_trio' not in sys.modules\n"
    (tmp_path / "test_other.py").write_text(tests)
    done = project("", "test_other.py")
    assert "1 passed" in outcomes(done), done.stdout + done.stderr


CONTAINER = """
from testcontainers.community.postgres import PostgresContainer

@pytest.fixture(scope="session")
def pulse_server():
    with PostgresContainer("postgres:18", driver=None, **ACCOUNT) as server:
        yield server.get_connection_url()


def test_there(pulse_sync_client, pulse_worker):
    pulse_sync_client.enqueue(welcome, "Ada")
    assert pulse_worker.drain_sync().ended == {"completed": 1}
"""
NO_RUNTIME = """
import os

os.environ["DOCKER_HOST"] = "unix:///no/such/docker.sock"
ACCOUNT = {}
"""
# The library's own code from the constructor to the address; only the runtime is not there.
WITHOUT_A_RUNTIME = """
from unittest.mock import Mock
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict
from testcontainers.community.postgres import PostgresContainer
from testcontainers.core import container

where = conninfo_to_dict(SERVER)
ACCOUNT = {"username": where["user"], "password": where["password"], "dbname": where["dbname"]}
container.DockerClient = Mock()
PostgresContainer.get_container_host_ip = lambda self: quote(where["host"], safe="")
PostgresContainer.get_exposed_port = lambda self, port: int(where["port"])


def started(self):
    self._container = Mock()
    return self


PostgresContainer.start = started
"""


def test_the_address_of_a_testcontainer_is_the_server_of_the_tests(
    project: Callable[..., subprocess.CompletedProcess[str]], creator_dsn: str
) -> None:
    given = f"SERVER = {creator_dsn!r}\n{WITHOUT_A_RUNTIME}"
    done = project(given + CONTAINER, dsn=None)
    assert "1 passed" in outcomes(done), done.stdout + done.stderr
    assert left_behind(creator_dsn) == []


def test_without_docker_testcontainers_says_so(project: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = project(NO_RUNTIME + CONTAINER, dsn=None)
    assert "1 error" in outcomes(done), done.stdout + done.stderr
    assert "DockerException" in done.stdout


AUTOJUMP = """
@pytest.mark.trio
async def test_under_the_wrong_clock(autojump_clock, pulse_client):
    raise AssertionError("never begun")


@pytest.mark.trio
async def test_under_the_right_one(pulse_clock, pulse_client, pulse_worker):
    await sign_up(pulse_client, "Ada")
    assert (await pulse_worker.drain()).ended == {"completed": 1}
"""


def test_a_client_under_a_clock_that_jumps_says_which_clock_to_use(
    project: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = project(AUTOJUMP)
    assert "1 failed, 1 passed" in outcomes(done), done.stdout + done.stderr
    assert "use pulse_clock, not autojump_clock" in done.stdout
