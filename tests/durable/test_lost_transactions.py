"""The connection of a `job.transaction_step` is lost in it: its writes are rolled back, and the step has not failed."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Job, StepFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.trees import Trees


class Connected:
    """A connection as the kernel and PostgreSQL know it."""

    def __init__(self, connection: Any) -> None:
        self.process = connection.info.backend_pid
        self.socket = socket.socket(fileno=os.dup(connection.fileno()))


def _restarts(trees: Trees, connected: Connected) -> None:
    """PostgreSQL ends its process, and says so."""
    trees.window.run("SELECT pg_terminate_backend(%s, 10000)", connected.process)
    connected.socket.close()


def _crashes(_: Trees, connected: Connected) -> None:
    """It ends without a word."""
    with connected.socket:
        connected.socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("goes", [_restarts, _crashes])
@pytest.mark.parametrize("at", ["a statement", "its end", "its commit, and its function hides it"])
async def test_a_handler_that_undoes_each_failure_completes_in_the_next_attempt(
    trees: Trees, goes: Callable[[Trees, Connected], None], at: str
) -> None:
    said: list[str] = []
    trees.window.run("CREATE TABLE public.booking (n int)")

    async def charge() -> None:
        said.append("charge")

    async def refund() -> None:
        said.append("refund")

    async def book(tx: Any, attempt: int) -> str:
        said.append("book")
        await tx.execute("INSERT INTO public.booking VALUES (1)")
        if attempt == 1:
            goes(trees, Connected(tx.connection))
            if at != "its end":
                try:
                    await tx.execute("SELECT 1")
                except Exception:
                    if at == "a statement":
                        raise
        return "booked"

    @trees.handlers.job(durable=True, max_attempts=3)
    async def order(job: Job) -> str:
        await job.step(charge)
        try:
            return await job.transaction_step(book, job.attempt)
        except BaseException as error:
            said.append(type(error).__name__)
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        for _ in range(2):
            await trees.burst(log=False)
            trees.again()
    found = trees.job(job_id)
    assert (found["state"], found["result"], said) == (
        "completed",
        "booked",
        ["charge", "book", DatabaseUnavailable.__name__, "book"],
    )
    assert trees.window.value("SELECT count(*) FROM public.booking") == 1
    (first, _) = trees.window.run("SELECT outcome, error FROM attempts WHERE job_id = %s ORDER BY attempt", job_id)
    assert first["outcome"] == "failed"
    assert first["error"].startswith(
        "DatabaseUnavailable: step book: its writes are rolled back, for the connection was lost: "
    )


@pytest.mark.parametrize("goes", [_restarts, _crashes])
async def test_a_connection_that_was_lost_while_it_was_idle_fails_no_step(
    trees: Trees, goes: Callable[[Trees, Connected], None]
) -> None:
    kept: list[Connected] = []

    async def book(tx: Any) -> None:
        kept.append(Connected(tx.connection))
        await tx.execute("SELECT 1")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        await job.transaction_step(book)
        goes(trees, kept[0])
        await job.transaction_step(book)
        kept[1].socket.close()

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst(log=False)
    assert trees.job(job_id)["state"] == "completed"


LIMITS = ["idle_in_transaction_session_timeout", "transaction_timeout"]


@pytest.fixture
def limit(request: pytest.FixtureRequest, trees: Trees) -> Iterator[str]:
    """A time limit of the database, which ends a transaction soon."""
    name = trees.window.connection.info.dbname
    if request.param == "transaction_timeout" and trees.window.connection.info.server_version < 170_000:
        pytest.skip("PostgreSQL 17 has brought it")
    trees.window.run(f'ALTER DATABASE "{name}" SET {request.param} = 200')
    yield request.param
    trees.window.run(f'ALTER DATABASE "{name}" RESET {request.param}')


async def _is_ended(tx: Any) -> None:
    """Readable: the server has said why it ends the session."""
    await trio.lowlevel.wait_readable(tx.connection.fileno())


@pytest.mark.parametrize("limit", LIMITS, indirect=True)
@pytest.mark.parametrize("at", ["a statement", "its end", "a task of its function"])
async def test_a_step_that_is_cut_off_for_its_own_slowness_has_failed(limit: str, at: str, trees: Trees) -> None:
    """It would be in each attempt."""
    said: list[str] = []

    async def refund() -> str:
        return "refunded"

    async def book(tx: Any) -> None:
        await tx.execute("SELECT 1")
        await _is_ended(tx)
        if at == "a statement":
            await tx.execute("SELECT 1")
        elif at == "a task of its function":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tx.execute, "SELECT 1")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            await job.transaction_step(book)
        except StepFailed as error:
            said.append(str(error))
            return await job.step(refund)
        return "booked"

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst(log=False)
    assert trees.job(job_id)["result"] == "refunded"
    assert ("TransactionTimeout" if limit == "transaction_timeout" else "IdleInTransactionSessionTimeout") in said[0]


@pytest.mark.parametrize("limit", LIMITS, indirect=True)
@pytest.mark.parametrize("at", ["a statement", "its end"])
async def test_a_plain_handlers_transaction_that_stands_for_longer_than_its_role_may_names_the_setting(
    limit: str, at: str, trees: Trees
) -> None:
    """ "The connection was lost during COMMIT", and nothing said whose doing it was; at a statement, PostgreSQL's own words."""

    @trees.handlers.job(max_attempts=1)
    async def order(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("SELECT 1")
            await _is_ended(tx)
            if at == "a statement":
                await tx.execute("SELECT 1")

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst(log=False)
    assert trees.job(job_id)["error"].splitlines()[0] == (
        f"DatabaseUnavailable: the transaction of job {job_id} was rolled back: the server ended it, and its connection, "
        f"before COMMIT, by the setting {limit}: it stood for too long"
    )
