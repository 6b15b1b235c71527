"""The connection of a `job.transaction_step` is lost in it: its writes are rolled back, and the step has not failed."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Job, StepFailed

if TYPE_CHECKING:
    from collections.abc import Callable

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


async def test_a_step_that_is_cut_off_for_its_own_slowness_has_failed(trees: Trees) -> None:
    """It would be in each attempt."""

    said: list[str] = []

    async def refund() -> str:
        return "refunded"

    async def book(tx: Any) -> None:
        await tx.execute("SET LOCAL idle_in_transaction_session_timeout = '10ms'")
        # Readable: the server has said goodbye.
        await trio.lowlevel.wait_readable(tx.connection.fileno())
        await tx.execute("SELECT 1")

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
    assert "IdleInTransactionSessionTimeout" in said[0]


async def test_a_plain_handlers_transaction_that_stood_too_long_names_the_setting_that_ended_it(trees: Trees) -> None:
    """ "The connection was lost during COMMIT", and nothing said whose doing it was."""

    @trees.handlers.job(max_attempts=1)
    async def order(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("SET LOCAL idle_in_transaction_session_timeout = '10ms'")
            await trio.lowlevel.wait_readable(tx.connection.fileno())

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst(log=False)
    assert trees.job(job_id)["error"].splitlines()[0] == (
        f"DatabaseUnavailable: the transaction of job {job_id} was rolled back: the server ended it, and its connection, "
        "before COMMIT, by the setting idle_in_transaction_session_timeout: it stood for too long"
    )
