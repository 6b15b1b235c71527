"""Programs as they are deployed: a login with a password for each, that of the migrations no superuser either."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pulse_trio import SyncClient, open_client
from pulse_trio.client import request_by_name
from pulse_trio.embedded import embedded_server
from pulse_trio.errors import DatabaseUnavailable, UsageError
from pulse_trio.grants import grant_sync
from pulse_trio.migrate import migrate_sync
from support.stores import Window
from support.workers import until

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.testing.faults.processes import Processes

LOGINS = ("migrator", "producer", "worker", "operator")
ACCESS = "local all postgres trust\nlocal all all scram-sha-256\n"


class Office:
    """A server that asks for passwords, and a database whose schema belongs to `migrator`."""

    def __init__(self, superuser: str) -> None:
        self.superuser = make_conninfo(superuser, dbname="office")

    def password(self, login: str) -> str:
        return f"secret-of-{login} p@ss:w/rd%'\\"

    def as_(self, login: str, password: str | None = None) -> str:
        """The DSN of a login, as a URL-less string with its password."""
        return make_conninfo(self.superuser, user=login, password=password or self.password(login))


@pytest.fixture(scope="module")
def office() -> Generator[Office]:
    # A server of its own: the run's may be anybody's, and what it asks for is in a file.
    folder = Path(tempfile.mkdtemp(prefix="pulse-trio-logins-"))
    folder.chmod(0o711)
    try:
        with embedded_server(folder / "pg") as server:
            with Window(server.dsn) as admin:
                Path(admin.value("SHOW hba_file")).write_text(ACCESS)
                admin.run("SELECT pg_reload_conf()")
                office = Office(server.dsn)
                for login in (*LOGINS, "stranger"):
                    password = admin.value("SELECT quote_literal(%s::text)", office.password(login))
                    admin.run(f"CREATE ROLE {login} LOGIN PASSWORD {password}")
                admin.run("CREATE DATABASE office OWNER migrator")
            migrate_sync(office.as_("migrator"))
            grant_sync(office.as_("migrator"), {"producer": "producer", "worker": "worker", "operator": "operator"})
            yield office
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def app(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "support" / "logins_app.py", tmp_path / "app.py")


def test_each_login_needs_its_password(office: Office) -> None:
    for login in LOGINS:
        with Window(office.as_(login)) as window:
            assert window.value("SELECT session_user") == login
            assert not window.value("SELECT rolsuper FROM pg_roles WHERE rolname = session_user")
        with pytest.raises(DatabaseUnavailable, match="password authentication failed") as refused:
            SyncClient(office.as_(login, "another-password")).enqueue("greet")
        assert "another-password" not in str(refused.value)


@pytest.mark.usefixtures("app")
async def test_a_worker_process_does_all_of_its_work(office: Office, processes: Processes) -> None:
    with Window(office.superuser) as admin:
        admin.run("CREATE TABLE public.ledger (job bigint, amount int)")
        admin.run("GRANT INSERT ON public.ledger TO worker")
        # What retention is to find: a job that finished a month ago, and its partition.
        old = admin.enqueue("gone", kind="noop")
        admin.run("SELECT cancel(%s)", old)
        admin.run("UPDATE job_archive SET finished_at = finished_at - interval '30 days'")
    options = [
        "run",
        "app:handlers",
        f"--dsn={office.as_('worker')}",
        "--watchdog=0.2",
        "--poll=0.2",
        "--lease=6",
        "--heartbeat=0.5",
    ]
    async with open_client(office.as_("producer")) as producer, open_client(office.as_("operator")) as operator:
        greeted = await producer.enqueue("greet", {"name": "Ada"})
        failed = await producer.enqueue("failing", max_attempts=2, backoff_base=0.001)
        few = await producer.enqueue_many(request_by_name("limited", {"n": n}, queue="limited") for n in range(5))
        paid = await producer.enqueue("pay", {"amount": 7})
        crashed = await producer.enqueue("wait")

        first = await processes.command(*options)
        await first.line(f"waiting {crashed.id} attempt 1")
        first.kill()
        await first.ended()
        with Window(office.superuser) as admin:
            # Its lease would end by itself in a few seconds.
            admin.run("UPDATE job SET lease_until = clock_timestamp() WHERE id = %s", crashed.id)

        second = await processes.command(*options)
        await second.line(f"waiting {crashed.id} attempt 2")
        cancelled = await producer.enqueue("wait")
        await second.line(f"waiting {cancelled.id} attempt 1")
        await operator.cancel(cancelled.id, reason="enough")
        await second.line(f"job {cancelled.id} .*is being cancelled: enough")

        seen = {
            ref.id: await operator.wait(ref.id, timeout=20) for ref in [greeted, failed, *few, paid, crashed, cancelled]
        }
        assert seen[greeted.id].result == "hello Ada"
        assert seen[failed.id].state == "dead"
        assert [seen[ref.id].result for ref in few] == [0, 1, 2, 3, 4]
        assert (seen[crashed.id].result, seen[crashed.id].attempt) == ("rescued", 2)
        assert (seen[cancelled.id].state, seen[cancelled.id].cancel_reason) == ("cancelled", "enough")
        with Window(office.superuser) as admin:
            assert admin.run("SELECT * FROM public.ledger") == [{"job": paid.id, "amount": 7}]
        await until(office.superuser, "SELECT FROM pulse.fires WHERE name = 'ticks'")
        # The partitions are the migrator's, and only its function may drop or clear them.
        await until(office.superuser, f"SELECT WHERE NOT EXISTS (SELECT FROM pulse.jobs WHERE id = {old})")
    for process in (first, second):
        assert "permission denied" not in process.stderr
        assert "secret-of" not in process.stdout + process.stderr
        assert "Traceback" not in process.stderr


def test_a_producer_can_enqueue_and_is_told_who_can_do_the_rest(office: Office) -> None:
    client = SyncClient(office.as_("producer"))
    job = client.enqueue("greet", {"name": "Ada"}, queue="untouched")
    assert job.added
    for attempt in (
        lambda: client.job(job.id),
        lambda: client.jobs(),
        lambda: client.queues(),
        lambda: client.cancel(job.id),
        lambda: client.cancellations(job.id),
        lambda: client.retry(job.id),
        lambda: client.retry_many(queue="untouched", state="dead"),
        lambda: client.delete(job.id),
        lambda: client.pause("untouched"),
        lambda: client.pause(kind="greet"),
        lambda: client.resume("untouched"),
        lambda: client.limit_queue("untouched", limit=1),
        lambda: client.schedules(),
        lambda: client.schedule("mine", "greet", {"name": "Ada"}, every=60),
        lambda: client.run_schedule("ticks"),
        lambda: client.stack(job.id),
    ):
        with pytest.raises(
            UsageError, match=r"permission denied for .* the schema's owner, run: pulse-trio grants.* --operator ROLE"
        ):
            attempt()


def test_a_worker_cannot_do_what_is_an_operators(office: Office) -> None:
    client = SyncClient(office.as_("worker"))
    job = client.enqueue("greet", {"name": "Ada"}, queue="untouched")
    assert client.job(job.id).state == "available"
    for attempt in (
        lambda: client.cancel(job.id),
        lambda: client.retry(job.id),
        lambda: client.delete(job.id),
        lambda: client.pause(kind="greet"),
        lambda: client.stack(job.id),
    ):
        with pytest.raises(
            UsageError, match=r"needs the rights of an operator.*: .* pulse-trio grants --operator ROLE"
        ):
            attempt()


def test_an_operator_operates_and_cannot_work_as_a_worker(office: Office) -> None:
    client = SyncClient(office.as_("operator"))
    job = client.enqueue("greet", {"name": "Ada"}, queue="operated")
    assert client.pause("operated")
    assert client.resume("operated")
    assert client.cancel(job.id, reason="tried").state == "cancelled"
    assert client.cancellations(job.id)[0].requested_by.startswith("operator ")
    assert client.retry(job.id) == "available"
    client.delete(job.id)
    with Window(office.as_("operator")) as window:
        for query in ("UPDATE job SET state = 2", "DELETE FROM job_archive", "DROP TABLE job", "SELECT upkeep('1 s')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                window.run(query)


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("login", ["producer", "operator", "stranger"])
async def test_a_worker_under_another_login_says_so_and_ends(office: Office, processes: Processes, login: str) -> None:
    worker = await processes.command("run", "app:handlers", f"--dsn={office.as_(login)}")
    assert await worker.ended() == 2, worker.report()
    assert "permission denied" in worker.stderr
    assert re.search("schema's owner, run: pulse-trio grants.* --worker ROLE", worker.stderr)
    assert "secret-of" not in worker.stderr
    assert "Traceback" not in worker.stderr


def test_whoever_was_granted_nothing_is_told_what_to_ask_for(office: Office) -> None:
    client = SyncClient(office.as_("stranger"))
    for attempt in (lambda: client.enqueue("greet", {"name": "Ada"}), client.jobs):
        with pytest.raises(UsageError, match=r"permission denied for schema pulse\. That needs .*--producer ROLE or "):
            attempt()
    with pytest.raises(UsageError, match="The schema pulse belongs to migrator"):
        migrate_sync(office.as_("stranger"))


def test_the_migrations_login_migrates_and_grants_again_and_is_nobody_special(office: Office) -> None:
    assert migrate_sync(office.as_("migrator")) == []
    grant_sync(office.as_("migrator"), {"operator": "operator"})
    with Window(office.as_("migrator")) as window, pytest.raises(psycopg.errors.InsufficientPrivilege):
        window.run("CREATE ROLE another")
