"""`crash_points` with a real database: transactions that are committed, rolled back, or left by a killed worker."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
import trio.testing

from pulse_trio import ConfigurationError, DatabaseUnavailable, Handlers, Job
from pulse_trio.testing import NeverEnds, crash_points

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pulse_trio.handlers import Handler

handlers = Handlers()
database: ContextVar[str] = ContextVar("database")
row_locked: ContextVar[trio.Event | None] = ContextVar("row_locked", default=None)


@handlers.job
async def pay(job: Job, amount: int) -> None:
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO paid VALUES (%s, %s)", [job.id, amount])


@handlers.job
async def pay_by_halves(job: Job, amount: int) -> None:
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO paid VALUES (%s, 0)", [job.id])
        # How often this one waits at its socket differs from run to run: it is one point all the same.
        await tx.execute("SELECT repeat('x', 100000), pg_sleep(0.01) FROM generate_series(1, 3)")
        async with tx.transaction():
            await tx.execute("UPDATE paid SET amount = %s WHERE job = %s", [amount, job.id])
    await trio.lowlevel.checkpoint()


@handlers.job(max_attempts=2)
async def pay_beside(job: Job, amount: int) -> None:
    with psycopg.connect(database.get(), autocommit=True) as own:
        own.execute("INSERT INTO paid VALUES (%s, %s)", [job.id, amount])
    async with job.transaction():  # it is paid, and the job is not completed
        pass


@handlers.job
async def pay_once(job: Job, amount: int) -> None:
    with psycopg.connect(database.get(), options="-c lock_timeout=10s") as own:
        own.execute("INSERT INTO paid VALUES (%s, %s)", [job.id, amount])
        await trio.lowlevel.checkpoint()


@handlers.job
async def pay_holding_its_row(job: Job, amount: int) -> None:
    # Its own connection does not wait in Trio, so the checkpoint is the first one in every run.
    with psycopg.connect(database.get()) as own:
        own.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [job.id])
        if (locked := row_locked.get()) is not None:
            locked.set()
        await trio.lowlevel.checkpoint()
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO paid VALUES (%s, %s)", [job.id, amount])


@pytest.fixture
def paid(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    token = database.set(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE paid (job bigint PRIMARY KEY, amount int)")
        yield connection
    database.reset(token)


async def pays_once(handler: Handler[..., Any], dsn: str, paid: psycopg.Connection[Any], only: str) -> str:
    async for run in crash_points(handler, 5, dsn=dsn, only=only):
        assert run.state == "completed"
        assert paid.execute("SELECT amount FROM paid WHERE job = %s", [run.job_id]).fetchall() == [(5,)]
        return f"{run.attempts} attempts, reached: {run.reached}"
    raise AssertionError("there is no such point")


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("none", "1 attempts, reached: True"),
        ("kill@start", "2 attempts, reached: True"),
        ("kill@2", "2 attempts, reached: True"),
        ("kill@3", "1 attempts, reached: True"),
        ("lost@2", "2 attempts, reached: True"),
        ("lost@3", "1 attempts, reached: True"),
        ("kill@end", "1 attempts, reached: True"),
    ],
)
async def test_a_payment_in_the_transaction_is_there_once(point: str, said: str, dsn: str, paid: Any) -> None:
    assert await pays_once(pay, dsn, paid, point) == said


async def test_a_payment_beside_the_transaction_is_found(dsn: str, paid: Any) -> None:
    with pytest.raises(AssertionError) as failed:
        await pays_once(pay_beside, dsn, paid, "kill@1")
    note = "".join(failed.value.__notes__)
    assert f"{Path(__file__).name}:" in note
    assert "in pay_beside: async with job.transaction()" in note, note
    assert "UniqueViolation" in note


async def test_the_connection_of_a_killed_handler_ends_and_its_transaction_is_rolled_back(dsn: str, paid: Any) -> None:
    # Otherwise the retry waits for the dead attempt's lock until its lock_timeout.
    with trio.fail_after(60):
        assert await pays_once(pay_once, dsn, paid, "kill@1") == "2 attempts, reached: True"


async def test_every_point_of_a_payment_in_the_transaction_is_survived(dsn: str, paid: psycopg.Connection[Any]) -> None:
    names: list[str] = []
    async for run in crash_points(pay, 5, dsn=dsn):
        names.append(run.point)
        assert run.state == "completed", str(run)
        assert paid.execute("SELECT amount FROM paid WHERE job = %s", [run.job_id]).fetchall() == [(5,)], str(run)
    assert names == [
        *("none", "kill@start"),
        *(f"{strike}@{number}" for number in range(1, 4) for strike in ("kill", "lost")),
        "kill@end",
    ]


async def test_each_statement_is_one_point_and_its_number_is_the_same_in_each_run(dsn: str, paid: Any) -> None:
    abouts = {
        1: ("await tx.execute", "after statement 1 of its transaction"),
        2: ("await tx.execute", "after statement 2 of its transaction"),
        3: ("async with tx.transaction", "after statement 3 of its transaction"),
        4: ("await tx.execute", "after statement 4 of its transaction"),
        5: ("async with tx.transaction", "after statement 5 of its transaction"),
        6: ("async with job.transaction", "before the completion of its transaction"),
        7: ("async with job.transaction", "after its COMMIT"),
        8: ("await trio.lowlevel.checkpoint", ""),
    }
    numbers = [5] * 10 + [1, 2, 3, 4, 6, 7, 8]
    for number in numbers:
        async for run in crash_points(pay_by_halves, 5, dsn=dsn, only=f"lost@{number}"):
            assert run.place is not None
            line, about = abouts[number]
            assert run.place.source.startswith(line), (number, run.place)
            assert (run.place.about, run.place.file) == (about, __file__), number
            # Before the completion the writes are rolled back; after COMMIT the job is done.
            assert (run.state, run.attempts) == ("completed", 2 if number < 7 else 1), number
            assert paid.execute("SELECT amount FROM paid WHERE job = %s", [run.job_id]).fetchall() == [(5,)]
    with pytest.raises(ConfigurationError, match="undisturbed, it had 8 checkpoints in 1 attempt"):
        await anext(crash_points(pay_by_halves, 5, dsn=dsn, only="lost@9"))


async def test_a_handler_that_holds_the_jobs_row_goes_on_and_pays_once(dsn: str, paid: Any) -> None:
    # It commits before the rescue looks again, or is rescued and pays in its second attempt.
    said = await pays_once(pay_holding_its_row, dsn, paid, "lost@1")
    assert said in ("1 attempts, reached: True", "2 attempts, reached: True")


async def test_a_test_that_is_cancelled_while_a_lease_is_being_lost_ends(dsn: str, paid: Any) -> None:
    locked = trio.Event()
    async with trio.open_nursery() as nursery:
        token = row_locked.set(locked)
        nursery.start_soon(pays_once, pay_holding_its_row, dsn, paid, "lost@1")
        row_locked.reset(token)
        await locked.wait()
        await trio.testing.wait_all_tasks_blocked()  # the handler waits until its worker is told
        nursery.cancel_scope.cancel()


async def test_an_attempt_that_is_late_while_its_lease_is_being_lost_is_ended(dsn: str, paid: Any) -> None:
    # Less than it takes until the row counts as locked.
    runs = crash_points(pay_holding_its_row, 5, dsn=dsn, only="lost@1", timeout=0.4)
    with pytest.raises(NeverEnds, match="did not end within"):
        await anext(runs)


@pytest.mark.parametrize(
    ("dsn_given", "error"),
    [("postgresql://nobody@127.0.0.1:1/none", DatabaseUnavailable), ("no connection string", ConfigurationError)],
)
async def test_without_a_server_the_error_itself_is_raised(dsn_given: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await anext(crash_points(pay, 5, dsn=dsn_given))
