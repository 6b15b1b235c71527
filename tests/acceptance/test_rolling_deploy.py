"""Two versions side by side lose nothing: of an application, and of pulse-trio itself."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Handlers, Job, SyncClient, Worker
from pulse_trio.migrate import migrate_sync
from pulse_trio.observe import UnfitArgumentsReleased
from support.embedded_workers import working
from support.workers import RUN, rows, settled, until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

ROOT = Path(__file__).parents[2]
BEFORE = "34b93827c583e9322fd88c26581864e8447f3128"
"""The version before: its schema ends with migration 0011."""
APP = """
import os

import trio

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job
async def greet(name: str) -> str:
    await trio.sleep(0.05)
    return f"{name} from {os.environ['VERSION']}"


@handlers.job(max_attempts=3)
def fail_once(path: str) -> str:
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) == 1:
        raise OSError("the first time")
    return "done"


NOW = os.environ["VERSION"] == "now"


@handlers.job(queue="before", max_attempts=1, **({"on_death": "mourn"} if NOW else {}))
def doomed() -> None:
    raise RuntimeError("no")


if NOW:

    @handlers.job(queue="mourning")
    def mourn(job_id: int, error: str) -> str:
        return f"{job_id}: {error.splitlines()[0]}"
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put back is due again at once."""
    monkeypatch.setattr("pulse_trio.worker.jobs.runner.UNKNOWN_KIND_DELAY", 0.05)


def old_version() -> Handlers:
    handlers = Handlers()

    @handlers.job(name="charge")
    async def charge(amount: int) -> str:
        return f"old {amount}"

    return handlers


def new_version(**options: Any) -> Handlers:
    handlers = Handlers()

    @handlers.job(name="charge", **options)
    async def charge(cents: int, currency: str) -> str:
        return f"new {cents} {currency}"

    return handlers


async def test_a_newer_producers_arguments_wait_for_a_newer_worker_and_say_why(dsn: str) -> None:
    client = SyncClient(dsn, handlers=new_version())
    job_id = client.enqueue("charge", {"cents": 5, "currency": "EUR"}).id
    async with working(old_version(), dsn, poll=0.05) as heard:
        told = await heard.until(UnfitArgumentsReleased, job_id=job_id, attempt=3)
        assert "do not fit charge(amount: " in told.error
        await until(dsn, "SELECT 1 FROM pulse.attempts WHERE outcome = 'released' AND attempt = 3")
        job = client.job(job_id)
        assert job.error is not None
        assert job.error.startswith("UnfitArguments: Arguments do not fit charge(amount: ")
        assert job.max_attempts - job.attempt >= 19
        async with working(new_version(), dsn, poll=0.05):
            assert (await settled(dsn, job_id))[::2] == ("completed", "new 5 EUR")


@pytest.mark.parametrize("runs", ["trio", "thread"])
async def test_arguments_of_an_older_version_are_upgraded(runs: str, dsn: str) -> None:
    def upgrade(args: dict[str, Any]) -> dict[str, Any]:
        if "amount" in args:
            return {"cents": args["amount"] * 100, "currency": "EUR"}
        return args

    handlers = new_version(upgrade=upgrade)
    if runs == "thread":
        handlers = Handlers()

        @handlers.job(name="charge", upgrade=upgrade)
        def charge(job: Job, *, cents: int, currency: str) -> str:
            return f"new {cents} {currency}"

    old = SyncClient(dsn, handlers=old_version()).enqueue("charge", {"amount": 5}).id
    new = SyncClient(dsn, handlers=handlers).enqueue("charge", {"cents": 7, "currency": "SEK"}).id
    await Worker(handlers, dsn, burst=True).run()
    assert (await settled(dsn, old))[::2] == ("completed", "new 500 EUR")
    assert (await settled(dsn, new))[::2] == ("completed", "new 7 SEK")


async def test_an_upgrade_that_fails_puts_the_job_back_and_keeps_its_arguments_to_itself(dsn: str) -> None:
    def upgrade(args: dict[str, Any]) -> dict[str, Any]:
        raise LookupError(f"a secret: {args}")

    job_id = SyncClient(dsn, handlers=old_version()).enqueue("charge", {"amount": 5}).id
    async with working(new_version(upgrade=upgrade), dsn, poll=0.05) as heard:
        told = await heard.until(UnfitArgumentsReleased, job_id=job_id)
    assert told.error.startswith("UnfitArguments: The upgrade of 'charge' failed on these arguments: LookupError.")
    assert "secret" not in told.error.partition("\n")[0]
    assert SyncClient(dsn).job(job_id).state in ("scheduled", "available")


async def test_arguments_that_fit_nobody_are_dead_when_patience_ends(dsn: str) -> None:
    client = SyncClient(dsn)
    job_id = client.enqueue("charge", {"wrong": 1}).id
    async with working(old_version(), dsn, poll=0.05, unfit_patience=0.5):
        state, attempt, _ = await settled(dsn, job_id)
    assert state == "dead"
    assert attempt > 1
    error = client.job(job_id).error
    assert error is not None
    assert error.startswith("UnfitArguments:")
    outcomes = [one.outcome for one in client.run(_attempts(job_id))]
    assert outcomes == ["released"] * (attempt - 1) + ["discarded"]
    # A person's retry begins anew.
    client.retry(job_id)
    async with working(old_version(), dsn, poll=0.05) as heard:
        await heard.until(UnfitArgumentsReleased, job_id=job_id, attempt=attempt + 1)
    assert client.job(job_id).state in ("scheduled", "available")


def _attempts(job_id: int) -> Any:
    from pulse_trio.store import operations

    return operations.attempts(job_id)


async def test_a_worker_of_the_version_before_and_a_new_one_share_the_work(
    empty_dsn: str, processes: Processes, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    archive = ["git", "archive", BEFORE, "src", "migrations"]
    found = await trio.run_process(archive, cwd=ROOT, capture_stdout=True, capture_stderr=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"there is no history of this version here: {found.stderr.decode().strip()}")
    await trio.run_process(["tar", "-x", "-C", str(before)], stdin=found.stdout)
    (tmp_path / "app.py").write_text(APP)
    old_path = {"PYTHONPATH": f"{before / 'src'}:{tmp_path}", "VERSION": "before"}

    def old(*arguments: str) -> Any:
        return processes.python("-m", "pulse_trio.cli", *arguments, f"--dsn={empty_dsn}", env=old_path)

    where = await processes.python("-c", "import pulse_trio; print(pulse_trio.__file__)", env=old_path)
    assert await where.ended() == 0
    assert str(before) in where.stdout
    migrated = await old("migrate")
    assert await migrated.ended() == 0, migrated.report()
    # The old worker does not serve the queue of the new one's hook: a kind that it does not know it puts back for 15 s.
    old_worker = await old(*RUN, "--queues=default,before")
    await until(empty_dsn, "SELECT 1 FROM pulse.workers WHERE state = 'running' HAVING count(*) = 1")
    producing = (
        "import sys; from pulse_trio import SyncClient; client = SyncClient(sys.argv[1])\n"
        "for n in range(20): client.enqueue('greet', {'name': f'{n} by ' + sys.argv[2]})\n"
        "client.enqueue('fail_once', {'path': sys.argv[2]}, max_attempts=3)"
    )
    # The schema of the new version comes while the old worker runs.
    assert migrate_sync(empty_dsn)
    new_worker = await processes.pulse_trio(
        *RUN, "--queues=default,mourning", f"--dsn={empty_dsn}", env={"VERSION": "now"}
    )
    for name, env in (("an old producer", old_path), ("a new producer", {})):
        producer = await processes.python("-c", producing, empty_dsn, name, env=env)
        assert await producer.ended() == 0, producer.report()
    count = "SELECT 1 FROM pulse.jobs WHERE state = 'completed' HAVING count(*) = 42"
    await until(empty_dsn, count)
    workers = rows(empty_dsn, "SELECT count(DISTINCT worker) FROM pulse.attempts")
    assert workers in ([(1,)], [(2,)])
    # A job that dies in the old worker is heard by the new one's hook: the old one does not know what a hook is.
    await until(empty_dsn, "SELECT 1 FROM pulse.death_hook")
    doomed = SyncClient(empty_dsn).enqueue("doomed", queue="before", max_attempts=1).id
    await until(empty_dsn, "SELECT 1 FROM pulse.jobs WHERE kind = 'mourn' AND state = 'completed'")
    assert rows(empty_dsn, "SELECT result #>> '{}' FROM pulse.jobs WHERE kind = 'mourn'") == [
        (f"{doomed}: RuntimeError: no",)
    ]
    # Each ends as it should with the other's schema and rows around it.
    for worker in (new_worker, old_worker):
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0, worker.report()
