"""The handlers of the tests of real logins, copied as `app.py` into the folder of a worker process."""

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()
handlers.queue("limited", limit=1, rate="1000/s")


@handlers.job
async def greet(job: Job, name: str) -> str:
    await job.progress(0.5, "half")
    return f"hello {name}"


@handlers.job(max_attempts=2, backoff_base=0.001)
async def failing() -> None:
    raise ValueError("as it should")


@handlers.job(queue="limited")
async def limited(n: int) -> int:
    return n


@handlers.job
async def pay(job: Job, amount: int) -> None:
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO public.ledger VALUES (%s, %s)", [job.id, amount])
        tx.result = amount


@handlers.cron(every=1, name="ticks")
@handlers.job
async def tick() -> None: ...


@handlers.job(max_attempts=3)
async def wait(job: Job) -> str:
    """Ends when it is cancelled; an attempt after a crash ends at once."""
    print(f"waiting {job.id} attempt {job.attempt}", flush=True)  # noqa: T201 -- what the test waits for
    if job.attempt > 1:
        return "rescued"
    await trio.sleep_forever()
    return "never"
