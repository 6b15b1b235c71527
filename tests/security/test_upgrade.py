"""A worker of this version under a login that still has the rights of an older one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pulse_trio import Handlers, SchemaError, UsageError, Worker
from pulse_trio.grants import grant_sync
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes
    from support.logins import Logins

APP = Path(__file__).parents[1] / "support" / "logins_app.py"


async def test_a_worker_with_the_rights_of_an_older_version_ends_at_once_and_names_grants(
    logins: Logins, processes: Processes
) -> None:
    shutil.copy(APP, processes.folder / "app.py")
    name = logins.names["worker"]
    with Window(logins.dsn) as owner:
        # The rights that commit 34b9382 granted had no such function.
        owner.run(f"REVOKE EXECUTE ON FUNCTION stack_questions FROM {name}")
        job_id = owner.enqueue(kind="greet", args={"name": "Ada"})
        for processes_ in ("1", "2"):
            worker = await processes.command(
                "run", "app:handlers", "--burst", f"--processes={processes_}", f"--dsn={logins.as_('worker')}"
            )
            assert await worker.ended() == 1, worker.report()
            assert (
                f"the role {name!r} lacks rights that workers of this version need: EXECUTE on stack_questions"
                in worker.stderr
            )
            assert "as the schema's owner, run: pulse-trio grants --worker ROLE" in worker.stderr
            assert "Traceback" not in worker.stderr
        assert owner.value("SELECT attempt FROM job WHERE id = %s", job_id) == 0
        doctor = await processes.command("doctor", f"--dsn={logins.as_('worker')}")
        assert await doctor.ended() == 1
        assert "EXECUTE on stack_questions" in doctor.stdout
        grant_sync(logins.dsn, {"worker": name})
        worker = await processes.command("run", "app:handlers", "--burst", f"--dsn={logins.as_('worker')}")
        assert await worker.ended() == 0, worker.report()
        assert owner.value("SELECT state FROM jobs WHERE id = %s", job_id) == "completed"


@pytest.mark.parametrize(
    ("right", "named"),
    [
        ("INSERT ON attempt", "INSERT on attempt"),
        ("UPDATE (error) ON attempt", "UPDATE on attempt"),
        ("UPDATE (ended_at) ON cancellation", "UPDATE on cancellation"),
        ("DELETE ON schedule_fire", "DELETE on schedule_fire"),
        ("EXECUTE ON FUNCTION claim_limited", "EXECUTE on claim_limited"),
        ("EXECUTE ON FUNCTION receive_events", "EXECUTE on receive_events"),
        ("EXECUTE ON FUNCTION comes_after_deadline", "EXECUTE on comes_after_deadline"),
        ("EXECUTE ON FUNCTION missing_lines", "EXECUTE on missing_lines"),
    ],
)
async def test_each_right_that_a_workers_own_tasks_need_is_asked_for(logins: Logins, right: str, named: str) -> None:
    with Window(logins.dsn) as owner:
        owner.run(f"REVOKE {right} FROM {logins.names['worker']}")
    with pytest.raises(SchemaError, match=named):
        await Worker(Handlers(), logins.as_("worker"), burst=True).run()


async def test_what_people_look_at_and_what_handlers_may_do_is_not_asked_for(logins: Logins) -> None:
    with Window(logins.dsn) as owner:
        for right in ("SELECT ON jobs, workers", "EXECUTE ON FUNCTION upkeep, enqueue, note_enqueue"):
            owner.run(f"REVOKE {right} FROM {logins.names['worker']}")
    await Worker(Handlers(), logins.as_("worker"), burst=True).run()


async def test_an_operator_is_no_worker(logins: Logins) -> None:
    with pytest.raises(UsageError, match=r"permission denied: .* run: pulse-trio grants --worker ROLE"):
        await Worker(Handlers(), logins.as_("operator")).run()
