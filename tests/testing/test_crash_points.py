"""`crash_points` on handlers with planted bugs, each of which it must find at the right line, and on right ones."""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import AsyncIterator  # noqa: TC003 -- read where the resource is declared
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict

from pulse_trio import INJECTED, Client, Discard, Handlers, Job, RetryAfter, Snooze, SyncClient
from pulse_trio.errors import ConfigurationError, InvalidArguments
from pulse_trio.testing import CrashRun, crash_points
from pulse_trio.testing.faults.processes import open_processes
from support.points_app import append, appends_again_at_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pulse_trio.handlers import Handler
    from support.forking import Forker

handlers = Handlers()
sent: list[Any] = []
"""What the outer world got."""
marks: set[Any] = set()
"""What it remembers."""


@pytest.fixture(autouse=True)
def new_world() -> Iterator[None]:
    yield
    sent.clear()
    marks.clear()


def line_of(handler: Handler[..., Any], text: str) -> int:
    """The line of a handler's source that has a text."""
    lines, first = inspect.getsourcelines(handler.function)
    (found,) = [number for number, line in enumerate(lines, first) if text in line]
    return found


async def runs_of(handler: Handler[..., Any], *args: Any, **how: Any) -> list[CrashRun]:
    """All runs, without any assertion."""
    return [run async for run in crash_points(handler, *args, **how)]


async def sends_once(handler: Handler[..., Any], *args: Any, **how: Any) -> None:
    """What a user's test does."""
    async for _ in crash_points(handler, *args, **how):
        assert len(sent) == 1
        sent.clear()


# Handlers that are right


@handlers.job(max_attempts=5, timeout=60)
async def send_welcome(job: Job, user_id: int, template: str = "default") -> str:
    """The README's."""
    if job.attempt == 1:
        raise RetryAfter(1)
    await trio.sleep(0.1)
    return f"welcomed {user_id} with {template}"


@handlers.job
async def send_once(job: Job, number: int) -> None:
    await trio.lowlevel.checkpoint()
    if job.id not in marks:
        # The remote system deduplicates: both in one step.
        marks.add(job.id)
        sent.append(number)
    await trio.lowlevel.checkpoint()


@handlers.job
async def pay_once(job: Job, amount: int) -> None:
    await trio.lowlevel.checkpoint()
    async with job.transaction() as tx:
        await tx.execute(f"pay {amount}")


async def test_the_readmes_handler_survives_each_of_its_points() -> None:
    runs = await runs_of(send_welcome, 42, arguments={"template": "vip"})
    assert [run.point for run in runs] == ["none", "kill@start", "kill@1", "lost@1", "kill@end", "kill@end2"]
    assert [run.attempts for run in runs] == [2, 2, 3, 3, 2, 3]
    assert {(run.state, run.result, run.reached) for run in runs} == {("completed", "welcomed 42 with vip", True)}


async def test_a_handler_that_deduplicates_is_right_at_every_point() -> None:
    async for run in crash_points(send_once, 7):
        assert sent == [7], run
        sent.clear()


async def test_an_effect_inside_the_transaction_is_there_once_at_every_point() -> None:
    points: list[str] = []
    async for run in crash_points(pay_once, 5):
        assert (run.written, run.state) == (["pay 5"], "completed"), run
        points.append(run.point)
    lines = {run.place.line for run in await runs_of(pay_once, 5) if run.place is not None}
    # Before and inside of the block, and at its end: the completion, the COMMIT, and its answer.
    assert lines >= {line_of(pay_once, text) for text in ("trio.lowlevel", "job.transaction", "tx.execute")}
    assert points[-1] == "kill@end"


async def test_an_answer_to_commit_that_no_worker_hears_is_a_point_of_its_own() -> None:
    alone = [run for run in await runs_of(pay_once, 5) if run.point.startswith("kill@") and run.attempts == 1]
    # The COMMIT is done, the worker is killed, and there is nothing to retry.
    assert [run.state for run in alone] == ["completed"] * len(alone)
    assert len(alone) >= 2, "after the COMMIT, and after the end"


# Handlers with planted bugs


@handlers.job
async def send_twice(job: Job, number: int) -> None:
    await trio.lowlevel.checkpoint()  # nothing has happened
    sent.append(number)
    await trio.lowlevel.checkpoint()  # it was sent, and nothing says so
    await trio.lowlevel.checkpoint()


@handlers.job
async def pay_outside(job: Job, amount: int) -> None:
    async with job.transaction() as tx:
        await tx.execute(f"pay {amount}")
        sent.append(amount)
        await trio.lowlevel.checkpoint()  # outside of the transaction, and inside of its block


@handlers.job
async def tidy_in_finally(job: Job, name: str) -> None:
    if name in marks:
        raise Discard("the lock file is there")
    marks.add(name)
    try:
        await trio.lowlevel.checkpoint()  # the lock file is there
        sent.append(name)
    finally:
        marks.discard(name)


@handlers.job
async def only_the_first_time(job: Job) -> None:
    if job.attempt == 1:
        sent.append("welcome")


@handlers.job
async def refund_on_cancel(job: Job) -> None:
    try:
        await trio.lowlevel.checkpoint()  # its lease is lost here
    except trio.Cancelled:
        sent.append("refund")
        raise


@handlers.job
async def with_a_child(job: Job) -> None:
    async def child() -> None:
        await trio.lowlevel.checkpoint()
        sent.append("child")
        await trio.lowlevel.checkpoint()  # in a child

    job.nursery.start_soon(child)


@pytest.mark.parametrize(
    ("handler", "argument", "point", "line"),
    [
        (send_twice, [7], "kill@2", "it was sent"),
        (pay_outside, [7], "kill@3", "outside of the transaction"),
        (tidy_in_finally, ["lock"], "kill@1", "the lock file is there  "),
        (only_the_first_time, [], "kill@start", "async def"),
        (with_a_child, [], "kill@2", "in a child"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
async def test_a_planted_bug_is_found_at_its_line(
    handler: Handler[..., Any], argument: list[Any], point: str, line: str
) -> None:
    with pytest.raises(AssertionError) as failed:
        await sends_once(handler, *argument)
    note = "".join(failed.value.__notes__)
    wanted = (
        line_of(handler, line.strip())
        if not line.endswith("  ")
        else line_of(handler, "await trio.lowlevel.checkpoint()")
    )
    assert f"{Path(__file__).name}:{wanted} in {handler.kind}" in note
    assert f'only="{point}"' in note


async def test_a_point_can_be_run_again_alone() -> None:
    (run,) = await runs_of(send_twice, 7, only="kill@2")
    assert (run.point, sent) == ("kill@2", [7, 7])
    sent.clear()
    (run,) = await runs_of(send_twice, 7, only="none")
    assert (run.point, run.place, sent) == ("none", None, [7])


async def test_a_killed_handler_runs_neither_except_nor_finally() -> None:
    await runs_of(refund_on_cancel, only="kill@1")
    assert sent == []
    (run,) = await runs_of(tidy_in_finally, "lock", only="kill@1")
    assert (run.state, marks) == ("dead", {"lock"})


async def test_a_handler_whose_lease_is_lost_is_cancelled_there() -> None:
    (run,) = await runs_of(refund_on_cancel, only="lost@1")
    assert (sent, run.attempts, run.state) == (["refund"], 2, "completed")


@handlers.job
async def keeps_its_reason(job: Job) -> str:
    try:
        await trio.sleep(0.01)
    finally:
        sent.append(job.cancel_reason)
    return "mine" if job.attempt == 1 else "the other's"


@handlers.job
async def swallows(job: Job) -> str:
    with trio.move_on_after(3600):
        await trio.sleep(0.01)
    try:
        await trio.lowlevel.checkpoint()
    except trio.Cancelled:  # noqa: ASYNC103 -- a planted bug
        return "late"  # noqa: ASYNC104
    return "in time"


async def test_the_cancellation_gives_its_reason_and_the_late_report_is_refused() -> None:
    (run,) = await runs_of(keeps_its_reason, only="lost@1")
    assert (sent, run.result) == (["fence-lost", None], "the other's")
    (run,) = await runs_of(swallows, only="lost@1")
    assert (run.result, run.attempts) == ("in time", 2)


async def test_nothing_is_left_of_killed_workers_in_the_tests_own_trio() -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    await runs_of(with_a_child)
    await runs_of(pay_once, 1)
    assert trio.lowlevel.current_statistics().tasks_living == before


@handlers.job
async def in_a_generator(job: Job) -> None:
    async def pages() -> AsyncIterator[int]:
        try:
            for page in range(2):
                await trio.lowlevel.checkpoint()
                yield page
        finally:
            sent.append("closed")

    async with trio.open_nursery() as nursery:
        async for page in pages():
            nursery.start_soon(trio.sleep, 0)
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            sent.append(page)


def test_no_async_generator_of_a_killed_handler_is_closed_when_trio_ends() -> None:
    async def run() -> None:
        await runs_of(in_a_generator, only="kill@2")
        assert sent == [0, 1, "closed"], "the second attempt's"

    trio.run(run)
    assert sent == [0, 1, "closed"]


async def test_every_retry_is_due_at_once() -> None:
    @Handlers().job(max_attempts=3)
    async def patient(job: Job) -> int:
        if job.attempt == 1:
            raise Snooze(86400)
        if job.attempt == 2:
            raise RetryAfter(86400)
        return job.attempt

    with trio.fail_after(10):
        (run,) = await runs_of(patient, only="none")
    assert (run.result, run.attempts) == (3, 3)


async def test_a_job_that_dies_is_told_as_dead() -> None:
    @Handlers().job(max_attempts=1)
    async def once(job: Job) -> None:
        await trio.lowlevel.checkpoint()

    states = {run.point: run.state for run in await runs_of(once)}
    assert (states["none"], states["kill@1"]) == ("completed", "dead")


# What goes wrong says whose fault it is


async def test_a_handler_that_never_ends_is_named_with_the_line_where_it_waits() -> None:
    @Handlers().job
    async def endless(job: Job) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()  # here

    with pytest.raises(TimeoutError, match=r"'endless' did not end within 0\.2 s") as failed:
        await runs_of(endless, timeout=0.2)
    assert "# here" in str(failed.value)


async def test_a_handler_whose_job_always_comes_back_is_named() -> None:
    @Handlers().job
    async def snoozes(job: Job) -> None:
        raise Snooze(1)

    with pytest.raises(TimeoutError, match="'snoozes' came back 100 times"):
        await runs_of(snoozes, only="none")


@pytest.mark.parametrize("only", ["kill@0", "lost@start", "kill@", "kill", "7", "kill@-1", "lost@end"])
def test_a_point_that_cannot_be_is_refused(only: str) -> None:
    with pytest.raises(ConfigurationError, match="a point is none, kill@N"):
        crash_points(send_once, 7, only=only)


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    with pytest.raises(InvalidArguments):
        crash_points(send_once, "seven")
    with pytest.raises(ConfigurationError, match="takes a handler"):
        crash_points(send_once.function, 7)  # type: ignore[arg-type]


async def test_a_point_alone_that_the_handler_does_not_come_to_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match="did not come to kill@99; undisturbed, it had 2 checkpoints in 1 attempt"
    ):
        await runs_of(send_once, 7, only="kill@99")
    with pytest.raises(ConfigurationError, match="did not come to kill@end2"):
        await runs_of(send_once, 7, only="kill@end2")
    (run,) = await runs_of(send_once, 7, only="kill@2")
    assert run.reached


def test_a_process_has_no_lease_to_lose_at_a_point() -> None:
    with pytest.raises(ConfigurationError, match=r"'lost@1'.* is not lost here, only kill@N"):
        crash_points(append, "a file", only="lost@1")


async def test_a_database_needs_real_time(autojump_clock: object) -> None:
    with pytest.raises(ConfigurationError, match="talks to PostgreSQL, so it needs real time: no autojump_clock"):
        await runs_of(send_once, 7, dsn="host=127.0.0.1 port=1")


# A handler's surroundings

surrounded = Handlers()


class Mailer:
    pass


@surrounded.resource
async def mailer() -> AsyncIterator[Mailer]:
    marks.add("opened")
    yield Mailer()


@surrounded.middleware
async def noted(job: Job, call: Any) -> Any:
    marks.add("called")
    return await call()


@surrounded.job
async def mails(job: Job, number: int, mailer: Mailer) -> None:
    assert isinstance(mailer, Mailer)
    await trio.lowlevel.checkpoint()


async def test_a_handler_has_its_resources_and_middleware() -> None:
    runs = await runs_of(mails, 7, handlers=surrounded)
    assert {run.state for run in runs} == {"completed"}
    assert [run.point for run in runs] == ["none", "kill@start", "kill@1", "lost@1", "kill@end"]
    assert marks == {"opened", "called"}
    # The registry is as it was.
    assert (list(surrounded), mails.request_by_name({"number": 7}).args) == ([mails], '{"number":7}')


# Handlers of other kinds


@handlers.job(runs="asyncio")
async def on_asyncio(job: Job, number: int) -> None:
    async def send() -> None:
        await asyncio.sleep(0)
        sent.append(number)
        await asyncio.sleep(0)  # it was sent by a task

    async with asyncio.TaskGroup() as group:
        group.create_task(send())


@handlers.job(runs="asyncio")
async def tidies_on_asyncio(job: Job) -> None:
    marks.add("made")
    try:
        await asyncio.sleep(0.01)
    finally:
        marks.discard("made")
        sent.append(job.cancel_reason)


async def test_asyncio_handlers_are_killed_at_their_awaits() -> None:
    with pytest.raises(AssertionError) as failed:
        await sends_once(on_asyncio, 7)
    note = "".join(failed.value.__notes__)
    assert f"{Path(__file__).name}:{line_of(on_asyncio, 'by a task')} in" in note


async def test_an_asyncio_handler_runs_no_finally_when_killed_and_is_cancelled_when_its_lease_is_lost() -> None:
    (run,) = await runs_of(tidies_on_asyncio, only="kill@1")
    assert (sent, run.attempts, run.state) == ([None], 2, "completed")
    sent.clear()
    (run,) = await runs_of(tidies_on_asyncio, only="lost@1")
    assert (sent, run.attempts, run.state) == (["fence-lost", None], 2, "completed")


@handlers.job(runs="thread")
def in_a_thread(job: Job, number: int) -> None:
    total = 0
    sent.append(number)
    total += 1  # it was sent
    for _ in range(50):
        total += 1


async def test_a_thread_is_stopped_for_ever_before_a_line() -> None:
    with pytest.raises(AssertionError) as failed:
        await sends_once(in_a_thread, 7, only="kill@3")
    note = "".join(failed.value.__notes__)
    assert f"{Path(__file__).name}:{line_of(in_a_thread, 'it was sent')} in in_a_thread" in note
    sent.clear()
    await runs_of(in_a_thread, 7, only="kill@2")
    assert sent == [7]
    assert len(await runs_of(in_a_thread, 7)) < 40, "a loop's lines are points twice, not a hundred times"


@pytest.mark.usefixtures("forked_children")
async def test_a_process_is_killed_before_a_line(tmp_path: Path) -> None:
    world = tmp_path / "world"
    points: list[str] = []
    with pytest.raises(AssertionError) as failed:
        await writes_once(world, points)
    note = "".join(failed.value.__notes__)
    assert f"points_app.py:{line_of(append, 'it was written')} in append" in note
    # The last is before the file is closed: what was written is in the dead process's memory.
    assert points == ["none", "kill@start", "kill@1", "kill@2", "kill@3", "kill@4"]


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize(
    ("only", "attempts", "written"),
    [("none", 2, "12"), ("kill@start", 2, "2"), ("kill@start2", 3, "13"), ("kill@2", 2, "2"), ("kill@6", 3, "13")],
)
async def test_a_process_is_killed_once_although_its_job_is_retried_by_the_same_worker(
    only: str, attempts: int, written: str, tmp_path: Path
) -> None:
    """Its notes held two attempts, and could not be read: a worker takes a job again whose delay is next to nothing."""
    world = tmp_path / "world"
    (run,) = await runs_of(appends_again_at_once, str(world), only=only)
    assert (run.state, run.attempts, run.reached) == ("completed", attempts, True)
    assert world.read_text() == written


async def writes_once(world: Path, points: list[str]) -> None:
    async for run in crash_points(append, str(world)):
        assert (world.read_text(), run.state) == ("x", "completed")  # noqa: ASYNC240 -- a file of a byte
        world.unlink()  # noqa: ASYNC240
        points.append(run.point)


# Where it runs


async def _on_asyncio() -> list[str]:
    points: list[str] = []
    async for run in crash_points(send_once, 7):
        assert sent == [7]
        sent.clear()
        points.append(run.point)
    return points


def test_it_runs_in_tests_on_asyncio() -> None:
    points = asyncio.run(_on_asyncio())
    assert points[:4] == ["none", "kill@start", "kill@1", "lost@1"]


async def test_an_exception_that_the_body_catches_itself_ends_nothing() -> None:
    runs = 0
    async for _ in crash_points(send_once, 7):
        try:
            raise ValueError("the body's own")
        except ValueError:
            runs += 1
    assert runs == 7


async def test_a_loop_that_is_left_leaves_no_trace_function_behind() -> None:
    before = sys.gettrace()
    async for _ in crash_points(send_once, 7):
        break
    assert sys.gettrace() is before


async def test_pytest_shows_the_point_even_where_a_tracer_is_at_work(tmp_path: Path, forker_of_pytest: Forker) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "import pytest, trio\n"
        "from pulse_trio import Handlers\n"
        "from pulse_trio.testing import crash_points\n"
        "handlers, sent = Handlers(), []\n"
        "@handlers.job\n"
        "async def send(number: int) -> None:\n"
        "    sent.append(number)\n"
        "    await trio.sleep(0.001)\n"
        "@pytest.mark.trio\n"
        "async def test_it() -> None:\n"
        "    sys.settrace(lambda *_: None)\n"
        "    async for run in crash_points(send, 7):\n"
        "        assert sent == [7]\n"
        "        sent.clear()\n"
    )
    async with open_processes(tmp_path, forker_of_pytest) as processes:
        done = await processes.command("-q", "-p", "no:cacheprovider", str(tmp_path))
        assert await done.ended() == 1, done.report()
    assert "test_it.py:9 in send: await trio.sleep(0.001)" in done.stdout
    assert 'crash_points(send, ..., only="kill@1")' in done.stdout


@pytest.mark.parametrize("runs", ["trio", "thread"])
async def test_a_client_without_a_database_touches_none(
    runs: Literal["trio", "thread"], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It enqueued into the database that the environment names, a developer's or a production's."""
    for name, value in conninfo_to_dict(dsn).items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))
    registry = Handlers()

    @registry.job
    async def invoice(number: int) -> None: ...

    @registry.job(runs="thread")
    def bill(number: int, client: SyncClient = INJECTED) -> None:
        client.enqueue(invoice, number)

    @registry.job
    async def order(number: int, client: Client = INJECTED) -> None:
        await client.enqueue(invoice, number)

    lives = await runs_of(order if runs == "trio" else bill, 3, handlers=registry)
    assert {(life.state, life.error) for life in lives} == {("completed", None)}
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT count(*) FROM pulse.jobs").fetchone() == (0,)


seen: list[str] = []


@handlers.job(max_attempts=5)
async def in_two_tasks() -> None:
    async def walk(name: str) -> None:
        for _ in range(4):
            seen.append(name)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(walk, name)


@pytest.mark.parametrize("only", ["none", "kill@4", "lost@4"])
async def test_the_tasks_of_a_handler_have_the_same_order_in_each_run(
    only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trio drew it: `only=` did not come to the failure again."""
    run = sys.modules["trio._core._run"]
    monkeypatch.setattr(run, "_r", random.Random(0))
    monkeypatch.setattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING", False)
    orders: set[str] = set()
    for _ in range(10):
        seen.clear()
        async for _ in crash_points(in_two_tasks, only=only):
            orders.add("".join(seen))
    assert len(orders) == 1
