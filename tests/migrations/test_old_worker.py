"""The code of an older version works on beside this version's, on this version's schema, as during an upgrade."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio.jobs import JobRequest
from pulse_trio.migrate import migrate_sync
from pulse_trio.store.trees import Fence, NewChild
from support.stores import Window, claim_one, open_store
from support.workers import until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

OLD = "34b9382"
HERE = Path(__file__).parents[2]
EACH, AT_ONCE = 100, 4

APP = """
import os
import signal
from pathlib import Path

import trio
from pulse_trio import Handlers, Job

handlers = Handlers()
handlers.queue("limited", limit=2)

@handlers.job
async def plain(n: int) -> int:
    return n

@handlers.job(queue="limited")
async def limited(n: int) -> int:
    return n

@handlers.job(max_attempts=3, backoff_base=0.001, backoff_cap=0.01)
async def second_time(job: Job, n: int) -> int:
    if job.attempt == 1:
        raise ValueError("the first attempt")
    return n

@handlers.job
async def meet(n: int) -> int:
    Path(f"met-{os.getpid()}").touch()
    while len(list(Path().glob("met-*"))) < 2:
        await trio.sleep(0.02)
    return n

@handlers.job
async def noted(job: Job, n: int) -> None:
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO public.ledger VALUES (%s, %s)", [job.id, n])
        tx.result = n
"""

PRODUCER = """
import sys
from pulse_trio import SyncClient
from pulse_trio.client import request_by_name

client, each = SyncClient(sys.argv[1]), int(sys.argv[2])
for n in range(each // 4):
    client.enqueue("plain", {"n": n})
    client.enqueue("noted", {"n": n})
client.enqueue_many([request_by_name("limited", {"n": n}, queue="limited") for n in range(each // 4)])
client.enqueue_many([request_by_name("second_time", {"n": n}, max_attempts=3, backoff_base=0.001) for n in range(each // 4)])
print("enqueued", flush=True)
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The older version's source, from the repository's own history."""
    if not (HERE / ".git").exists():
        pytest.skip("this is no checkout of the repository: the older version's code is not here")
    asked = ["git", "-C", str(HERE), "archive", OLD, "src", "migrations"]
    archive = subprocess.run(asked, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"the repository does not have commit {OLD} (a shallow clone?)")
    place = tmp_path / "old"
    place.mkdir()
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return place


async def test_an_old_worker_that_runs_shares_the_work_of_old_and_new_producers_and_none_is_lost(
    empty_dsn: str, old: Path, processes: Processes
) -> None:
    (processes.folder / "app.py").write_text(APP)
    (processes.folder / "producer.py").write_text(PRODUCER)
    as_old = {"PYTHONPATH": os.fspath(old / "src")}
    migrating = await processes.python("-m", "pulse_trio.cli", "migrate", f"--dsn={empty_dsn}", env=as_old)
    assert await migrating.ended() == 0, migrating.report()
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute("CREATE TABLE public.ledger (job bigint, n int)")
    options = ["run", "app:handlers", f"--dsn={empty_dsn}", "--poll=0.2", f"--concurrency={AT_ONCE}"]
    first = await processes.python("-m", "pulse_trio.cli", *options, env=as_old)
    await until(empty_dsn, "SELECT FROM pulse.session WHERE ended_at IS NULL")

    assert migrate_sync(empty_dsn) != []
    second = await processes.pulse_trio(*options)
    await until(empty_dsn, "SELECT FROM pulse.session WHERE ended_at IS NULL HAVING count(*) = 2")
    # One more than a worker runs at once: both have to take some. They carry a trace, of which the older version knows nothing.
    with psycopg.connect(empty_dsn, autocommit=True) as producer:
        for n in range(AT_ONCE + 1):
            producer.execute(
                "SELECT pulse.enqueue('meet', jsonb_build_object('n', %s::int), traceparent => %s, tracestate => 'a=1')",
                [n, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
            )
    producers = [
        await processes.python("producer.py", empty_dsn, str(EACH), env=as_old),
        await processes.python("producer.py", empty_dsn, str(EACH)),
    ]
    for producer in producers:
        assert await producer.ended() == 0, producer.report()

    every = 2 * EACH + AT_ONCE + 1
    await until(empty_dsn, f"SELECT FROM pulse.jobs WHERE finished_at IS NOT NULL HAVING count(*) = {every}")
    with psycopg.connect(empty_dsn) as admin:

        def ask(query: str) -> list[tuple[object, ...]]:
            return admin.execute(query.encode()).fetchall()

        assert ask("SELECT state, count(*) FROM pulse.jobs GROUP BY state") == [("completed", every)]
        assert ask("SELECT FROM pulse.jobs WHERE (args->>'n') IS DISTINCT FROM (result #>> '{}')") == []
        # Each once, in one transaction with its completion.
        assert ask("SELECT count(*), count(DISTINCT job) FROM public.ledger") == [(EACH // 2, EACH // 2)]
        workers = ask("SELECT DISTINCT s.pid FROM pulse.attempts a JOIN pulse.session s ON s.id = a.worker")
    assert {pid for (pid,) in workers} == {first.pid, second.pid}
    for worker in (first, second):
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0, worker.report()
        assert "permission denied" not in worker.stderr


FAMILY = """
import trio
from pathlib import Path
from pulse_trio import Handlers

handlers = Handlers()

@handlers.job(queue="children")
async def fine(n: int) -> int:
    return n

@handlers.job(queue="children", max_attempts=1)
async def failing(n: int) -> int:
    raise ValueError("no")

@handlers.job(queue="children")
async def endless(n: int) -> int:
    Path(f"endless-{n}").touch()
    await trio.sleep_forever()

@handlers.job(queue="children")
async def held(n: int) -> int:
    Path(f"held-{n}").touch()
    while not Path("go").exists():
        await trio.sleep(0.02)
    return n
"""


async def test_an_old_worker_runs_and_ends_the_children_and_the_parents_of_new_ones(
    empty_dsn: str, old: Path, processes: Processes
) -> None:
    """It knows nothing of trees; the trigger sees what its statements do."""
    (processes.folder / "app.py").write_text(FAMILY)
    as_old = {"PYTHONPATH": os.fspath(old / "src")}
    migrating = await processes.python("-m", "pulse_trio.cli", "migrate", f"--dsn={empty_dsn}", env=as_old)
    assert await migrating.ended() == 0, migrating.report()
    options = ["run", "app:handlers", f"--dsn={empty_dsn}", "--poll=0.2", "--queues=children"]
    worker = await processes.python("-m", "pulse_trio.cli", *options, env=as_old)
    await until(empty_dsn, "SELECT FROM pulse.session WHERE ended_at IS NULL")
    migrate_sync(empty_dsn)
    with Window(empty_dsn) as window:
        async with open_store(empty_dsn) as store:

            async def start(fence: Fence, kind: str, key: str, n: int) -> int:
                request = JobRequest(kind, json.dumps({"n": n}), "children", 0, 1)
                (child,) = (await store.trees.start_children(fence, 0, [NewChild(request, key, b"")])).children
                return child.job_id

            window.enqueue("roots", kind="root")
            root = await claim_one(store, "roots")
            fence = Fence(root.id, root.attempt, root.session)
            fine, failing = await start(fence, "fine", "a", 1), await start(fence, "failing", "b", 2)
            endless = await start(fence, "endless", "c", 3)
            both = f"SELECT FROM pulse.job_archive WHERE id IN ({fine}, {failing}) HAVING count(*) = 2"
            await until(empty_dsn, both)
            members = {m.key: m for m in await store.trees.members(fence)}
            assert (members["a"].state, members["a"].result) == ("completed", "1")
            assert members["b"].state == "dead"
            assert "ValueError" in str(members["b"].error)

            # A cancelled member ends, although the old worker does not know why.
            await until(empty_dsn, f"SELECT FROM pulse.job WHERE id = {endless} AND state = 2")
            await store.trees.look(fence, 0)
            assert (await store.trees.cancel_block(fence, 0, "sibling")).whole
            await until(empty_dsn, f"SELECT FROM pulse.job_archive WHERE id = {endless}")
            assert window.state(endless) == "cancelled"
            assert window.value("SELECT count(*) FROM recheck WHERE job_id = %s", root.id) > 0

            # The old worker runs a parent, too, and completes it while a child lives: the outcome waits.
            parent = window.enqueue("children", kind="held", args={"n": 4})
            await until(empty_dsn, f"SELECT FROM pulse.job WHERE id = {parent} AND state = 2")
            ((attempt, session),) = [
                (row["attempt"], row["locked_by"])
                for row in window.run("SELECT attempt, locked_by FROM job WHERE id = %s", parent)
            ]
            child = await start(Fence(parent, attempt, session), "endless", "a", 5)
            await until(empty_dsn, f"SELECT FROM pulse.job WHERE id = {child} AND state = 2")
            (processes.folder / "go").touch()
            await until(empty_dsn, f"SELECT FROM pulse.durable_job WHERE job_id = {parent} AND ending = 4")
            # Looks, which any worker of this version does, cancel what is below.
            while not window.value("SELECT cancelling FROM job WHERE id = %s", child):
                await store.trees.recheck()
            await until(empty_dsn, f"SELECT FROM pulse.job_archive WHERE id = {child} AND state = 6")
            assert window.run("SELECT FROM job_archive WHERE id = %s", parent) == []
            while window.value("SELECT count(*) FROM recheck"):
                await store.trees.recheck()
            assert window.run("SELECT state, result FROM job_archive WHERE id = %s", parent) == [
                {"state": 4, "result": 4}
            ]
            assert window.run("SELECT outcome, error FROM attempt WHERE job_id = %s", parent) == []
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()
