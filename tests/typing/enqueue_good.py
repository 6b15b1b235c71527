"""Type-checked, never run: what a user writes must pass pyright strict."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, assert_type

from pulse_trio import (
    Client,
    Exponential,
    Fixed,
    Handler,
    Handlers,
    Job,
    JobRef,
    JobRequest,
    RetryContext,
    Snooze,
    State,
    SyncClient,
    Worker,
    WorkerReport,
    open_client,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import trio

handlers = Handlers()


@handlers.job(queue="mail", priority=0, max_attempts=20, timeout=60)
async def send_welcome(job: Job, user_id: int, template: str = "default") -> str:
    job.nursery.start_soon(print, job.id)
    if job.attempt > 3 and job.cancel_reason != "shutdown":
        raise Snooze(timedelta(minutes=1))
    with job.cleanup():
        return f"{user_id} {template} {job.deadline}"


def later(failure: RetryContext) -> float | None:
    return None if isinstance(failure.error, OSError) else failure.failures * 2


@handlers.job(
    retry={OSError: Fixed(5), (KeyError, ValueError): later}, retry_on=(OSError, KeyError), discard_on=TypeError
)
async def with_policies(job: Job, n: int) -> None:
    async with job.transaction(result=n) as tx:
        await tx.execute("INSERT INTO booking VALUES (%s)", [n])
        tx.result = {"n": n}


@handlers.job(retry=Exponential(base=2, cap=60, jitter=False), crash_limit=5)
async def with_backoff(n: int) -> None: ...


@handlers.job(retry=later)
async def with_a_function(n: int) -> None: ...


@handlers.job
async def without_job(n: int) -> list[int]:
    return [n]


@handlers.job(delay=timedelta(minutes=1), deadline=3600, expires=timedelta(minutes=5))
async def with_job(job: Job, *, n: int) -> None:
    return None


@handlers.job(name="resize.image")
def in_a_thread(path: str, width: int = 100) -> tuple[int, int]:
    return width, len(path)


@handlers.job(runs="thread")
def in_a_thread_with_job(job: Job, path: str) -> int:
    return job.id + len(path)


@handlers.job
def bare_in_a_thread(path: str, width: int = 100) -> int:
    return width + len(path)


@handlers.job
def bare_in_a_thread_with_job(job: Job, path: str) -> str:
    return path


@handlers.job(queue="mail")
async def optioned_without_job(n: int) -> int:
    return n


async def enqueue(client: Client) -> None:
    assert_type(await client.enqueue(bare_in_a_thread, "a.png", width=3), JobRef[int])
    assert_type(await (await client.enqueue(bare_in_a_thread_with_job, "a.png")).result(), str)
    assert_type(await client.enqueue(optioned_without_job, 3), JobRef[int])
    assert_type(bare_in_a_thread.request("a.png"), JobRequest)
    assert_type(await client.enqueue(send_welcome, 42), JobRef[str])
    assert_type(await client.enqueue(send_welcome, user_id=42, template="vip"), JobRef[str])
    ref = await client.enqueue(send_welcome.options(queue="slow", delay=60, priority=5, unique_key="u42"), 42)
    assert_type(await ref.result(), str)
    assert_type(await ref.status(), State)
    await client.enqueue(send_welcome.options(delay=timedelta(hours=1)), 42)
    await client.enqueue(send_welcome.options(at=datetime.now(UTC), expires=timedelta(hours=1)), 42)
    await client.enqueue(send_welcome.options(unique_key="u", unique_for=60, on_conflict="replace"), 42)
    await client.enqueue(send_welcome.options(deadline=datetime.now(UTC), timeout=timedelta(minutes=1)), 42)
    assert_type(await (await client.enqueue(without_job, 1)).result(), list[int])
    assert_type(await client.enqueue(with_job, n=1), JobRef[None])
    assert_type(await client.enqueue(in_a_thread, "a.png", width=3), JobRef[tuple[int, int]])
    assert_type(await client.enqueue(in_a_thread_with_job, "a.png"), JobRef[int])
    await client.enqueue("a kind of elsewhere", {"user_id": 42}, queue="mail", delay=3)
    await client.enqueue_many(send_welcome.request(i) for i in range(10_000))
    assert_type(send_welcome.request(1, template="x"), JobRequest)

    async def stream() -> AsyncGenerator[JobRequest]:
        yield send_welcome.request(1)

    await client.enqueue_many(stream(), chunk=10_000, progress=print)


def enqueue_blocking(client: SyncClient) -> None:
    assert_type(client.enqueue(send_welcome, 42).id, int)
    client.enqueue_many([without_job.request(1), in_a_thread.request("x", 2)], chunk=100)


def takes_a_handler(handler: Handler[[int], list[int]]) -> None: ...


takes_a_handler(without_job)


async def program(dsn: str, nursery: trio.Nursery) -> None:
    async with open_client(dsn) as client:
        await enqueue(client)
    worker = Worker(handlers, dsn, concurrency=5, queues=("mail",), burst=True)
    assert_type(await worker.run(), WorkerReport)
    await nursery.start(worker.run)
    worker.stop()


@handlers.cron("30 2 * * *", timezone="Europe/Berlin", args={"n": 1})
@handlers.job
async def on_schedule(job: Job, n: int) -> str:
    return str(n)


@handlers.cron(every=timedelta(minutes=5), catch_up="all", due_as="at")
async def on_its_own(at: datetime) -> None: ...


async def schedule(client: Client, sync: SyncClient) -> None:
    assert_type(await client.enqueue(on_schedule, 1), JobRef[str])
    assert_type(await client.enqueue(on_its_own, datetime.now(UTC)), JobRef[None])
    await client.schedule("more", on_schedule, {"n": 2}, cron="@hourly", queue="slow")
    assert_type(await client.resume_schedule("more"), datetime | None)
    assert_type(await client.run_schedule("more"), JobRef[Any])
    for found in sync.schedules():
        assert_type(sync.fires(found.name)[0].job_id, int)
