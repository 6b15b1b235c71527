"""`crash_points` with a real database: transactions that are committed, rolled back, or left by a killed worker."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from pulse_trio import Handlers, Job
from pulse_trio.testing import crash_points

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pulse_trio.handlers import Handler

handlers = Handlers()
database: ContextVar[str] = ContextVar("database")


@handlers.job
async def pay(job: Job, amount: int) -> None:
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO paid VALUES (%s, %s)", [job.id, amount])


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
        ("kill@3", "2 attempts, reached: True"),
        ("lost@3", "2 attempts, reached: True"),
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
