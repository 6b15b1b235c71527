"""Whom an event may be sent to, and what the sender hears: on Trio, on asyncio, blocking, and in SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio.to_thread
import psycopg
import pytest
import trio

from pulse_trio import Discard, Handlers, InvalidTransition, SyncClient, UnknownJob, Worker, open_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.stores import Window

pytestmark = pytest.mark.anyio
handlers = Handlers()


@handlers.job
async def plain(n: int) -> int:
    if n < 0:
        raise Discard("too small")
    return n


async def asks_async(dsn: str, job_id: int) -> bool:
    async with open_client(dsn) as client:
        return await client.send_event(job_id, "approved", 1, event_key="one")


async def asks_sync(dsn: str, job_id: int) -> bool:
    return await anyio.to_thread.run_sync(
        lambda: SyncClient(dsn).send_event(job_id, "approved", 1, event_key="one"),
    )


async def asks_in_sql(dsn: str, job_id: int) -> bool:
    """With the errors that the page of SQL names for the client's."""

    def ask() -> Any:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return connection.execute("SELECT pulse.send_event(%s, 'approved', '1', 'one')", [job_id]).fetchone()

    try:
        (sent,) = await anyio.to_thread.run_sync(ask)
    except psycopg.errors.NoDataFound as error:
        raise UnknownJob(str(error)) from None
    except psycopg.errors.ObjectNotInPrerequisiteState as error:
        raise InvalidTransition(str(error)) from None
    return sent


def burst(dsn: str) -> None:
    """Runs what is due, in a Trio run of its own."""
    trio.run(Worker(handlers, dsn, burst=True, log=False).run)


ENDS = {"completed": 1, "dead": -1, "cancelled": 2}
"""How a job is to end, and its argument."""
SENDERS = [asks_async, asks_sync, asks_in_sql]


@pytest.mark.parametrize("send", SENDERS)
async def test_the_sender_is_told_whether_an_event_can_still_be_received(
    dsn: str, window: Window, send: Callable[[str, int], Awaitable[bool]]
) -> None:
    client = SyncClient(dsn)
    jobs = {state: client.enqueue(plain, n) for state, n in ENDS.items()}
    client.cancel(jobs["cancelled"].id)
    await anyio.to_thread.run_sync(burst, dsn)
    for state, ref in jobs.items():
        with pytest.raises(InvalidTransition, match=f"(?i)job {ref.id} is {state}: it receives no more events"):
            await send(dsn, ref.id)
    with pytest.raises(UnknownJob, match=r"(?i)there is no job 999999999"):
        await send(dsn, 999_999_999)
    assert window.value("SELECT count(*) FROM event") == 0


@pytest.mark.parametrize("send", SENDERS)
async def test_an_event_for_a_plain_job_that_lives_is_kept_because_its_handler_is_the_workers_to_know(
    dsn: str, window: Window, send: Callable[[str, int], Awaitable[bool]]
) -> None:
    ref = SyncClient(dsn).enqueue(plain, 1)
    assert await send(dsn, ref.id)
    assert not await send(dsn, ref.id)
    await anyio.to_thread.run_sync(burst, dsn)
    assert window.run("SELECT line FROM event WHERE job_id = %s", ref.id) == [{"line": None}]
    with pytest.raises(InvalidTransition):
        await send(dsn, ref.id)
