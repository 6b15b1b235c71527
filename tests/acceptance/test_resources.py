"""Resources under real workers: whose fault a failure is, and clients over a real database."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import trio

from support.workers import RUN, enqueue, rows, settled

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

BROKEN = """
from pulse_trio import Handlers

handlers = Handlers()


@handlers.resource
async def search():
    raise ConnectionError("no search engine there")
    yield 1


@handlers.job
async def held(search) -> None: ...
"""


@pytest.mark.parametrize("count", [1, 2])
async def test_run_exits_with_2_and_names_a_resource_that_cannot_be_opened(
    count: int, dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(BROKEN)
    (job,) = enqueue(dsn)
    worker = await processes.command(*RUN, f"--dsn={dsn}", f"--processes={count}")
    assert await worker.ended() == 2, worker.report()
    assert "The resource 'search' (search, " in worker.stderr
    assert "app.py:7) failed when it was opened: ConnectionError: no search engine there" in worker.stderr
    assert "Traceback" not in worker.stderr.partition("failed when it was opened")[0]
    assert rows(dsn, "SELECT state, attempt FROM pulse.jobs WHERE id = %(id)s", {"id": job}) == [("available", 0)]


ENDLESS = """
import trio

from pulse_trio import Handlers

handlers = Handlers()


@handlers.resource
async def search():
    yield 1
    while True:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            pass


@handlers.job
async def held(search) -> None: ...
"""


@pytest.mark.parametrize("count", [1, 2])
async def test_a_resource_that_never_ends_does_not_keep_a_process_that_was_told_to_stop(
    count: int, dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(ENDLESS)
    (job,) = enqueue(dsn)
    worker = await processes.command(*RUN, f"--dsn={dsn}", f"--processes={count}", "--cleanup=0.2")
    await settled(dsn, job)
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 3, worker.report()
    assert "app.py:9) does not end although it was cancelled" in worker.stderr
    assert "this process ends without waiting for what does not end" in worker.stderr
    assert rows(dsn, "SELECT state FROM pulse.jobs WHERE id = %(id)s", {"id": job}) == [("completed",)]
    assert rows(dsn, "SELECT count(*) FROM pulse.workers WHERE state <> 'gone'") == [(0,)]


HOLDING = """
import os
from pathlib import Path

import trio

from pulse_trio import Handlers

handlers = Handlers()
how = os.environ["HOW"]


async def swallow():
    while True:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            pass


@handlers.resource
async def stubborn():
    if how == "opening":
        Path("opening").touch()
        await swallow()
    yield 1
    await swallow()


@handlers.resource
async def search(stubborn):
    if how == "another fails when it is opened":
        raise ConnectionError("no search engine there")
    async with trio.open_nursery() as nursery:
        if how == "another fails while jobs run":
            nursery.start_soon(break_down)
        yield 1


async def break_down():
    while not Path("begun").exists():
        await trio.sleep(0.02)
    raise ConnectionError("the search engine has gone")


@handlers.job
async def held(search) -> None:
    Path("begun").touch()
    await trio.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("how", "code", "ends", "said"),
    [
        ("opening", 3, "available", "this process ends without waiting"),
        ("another fails when it is opened", 2, "available", "ConnectionError: no search engine there"),
        ("another fails while jobs run", 1, "completed", "ConnectionError: the search engine has gone"),
        ("burst", 3, "completed", "this process ends without waiting"),
    ],
)
async def test_a_resource_that_swallows_its_cancellation_is_named_and_keeps_no_process(
    how: str, code: int, ends: str, said: str, dsn: str, processes: Processes, tmp_path: Path
) -> None:
    """Only a worker that was told to stop while its resources were open left such a one behind: all others never ended."""
    (tmp_path / "app.py").write_text(HOLDING)
    (job,) = enqueue(dsn)
    burst = ["--burst"] if how == "burst" else []
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--cleanup=0.2", *burst, env={"HOW": how})
    if how == "opening":
        while not (tmp_path / "opening").exists():  # noqa: ASYNC110 -- a file of another process
            await trio.sleep(0.02)
        worker.send(signal.SIGTERM)
    assert await worker.ended() == code, worker.report()
    assert "app.py:21) does not end although it was cancelled: it must not swallow trio.Cancelled" in worker.stderr
    assert said in worker.stderr
    assert rows(dsn, "SELECT state FROM pulse.jobs WHERE id = %(id)s", {"id": job}) == [(ends,)]
    assert rows(dsn, "SELECT count(*) FROM pulse.workers WHERE state <> 'gone'") == [(0,)]


CLIENTS = """
from pathlib import Path

from pulse_trio import Client, Handlers, SyncClient

handlers = Handlers()


@handlers.resource
async def marker(client: Client):
    yield client
    Path("closed").touch()


@handlers.job(name="trio")
async def in_trio(n: int, client: Client, marker) -> int:
    assert marker is client
    return (await client.enqueue(noted, n)).id


@handlers.job(name="asyncio", runs="asyncio")
async def in_asyncio(n: int, client: Client) -> int:
    return (await client.enqueue("noted", {"n": n})).id


@handlers.job(name="thread")
def in_thread(n: int, client: SyncClient) -> int:
    return client.enqueue(noted, n).id


@handlers.job
async def noted(n: int) -> int:
    return n
"""


async def test_a_handler_of_every_kind_in_the_worker_enqueues_with_a_client_of_the_workers(
    dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(CLIENTS)
    kinds = ["trio", "asyncio", "thread"]
    jobs = [enqueue(dsn, kind, n=n)[0] for n, kind in enumerate(kinds)]
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    for n, job in enumerate(jobs):
        state, _, made = await settled(dsn, job)
        assert state == "completed"
        assert await settled(dsn, made) == ("completed", 1, n)
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()
    assert (tmp_path / "closed").exists()
