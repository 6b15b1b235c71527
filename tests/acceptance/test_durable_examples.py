"""The worked examples of durable jobs, run by real workers that are killed: an order, a fan-out, an agent."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import SyncClient
from support.workers import rows, settled, until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

EXAMPLES = Path(__file__).parents[2] / "examples/durable"
RUN = ["--lease=3", "--heartbeat=0.9", "--watchdog=0.3", "--cleanup=0.5", "--poll=1"]

KILLED = """
import os, signal
from pathlib import Path

import {name} as example
from {name} import *

calls = Path("calls.txt")
at = int(os.environ.get("KILL_AT", "0"))


def counted(function):
    async def call(*args):
        with calls.open("a") as file:
            file.write(f"{{function.__name__}} {{args}}\\n")
        number = len(calls.read_text().splitlines())
        if number == at and not before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await function(*args)
        if number == at and before:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    call.__name__ = function.__name__
    call.__annotations__ = function.__annotations__
    return call


before = os.environ.get("KILLED") == "after"
for function in ({functions},):
    setattr(example, function.__name__, counted(function))
"""


async def worker(processes: Processes, dsn: str, app: str, *more: str, **env: str) -> Running:
    return await processes.command("run", f"{app}:handlers", f"--dsn={dsn}", *RUN, *more, env=env)


def take(processes: Processes, name: str, *functions: str) -> None:
    """Copies an example, and beside it a module that kills its process at one call of these functions."""
    shutil.copy(EXAMPLES / f"{name}.py", processes.folder)
    (processes.folder / f"{name}_killed.py").write_text(KILLED.format(name=name, functions=", ".join(functions)))


def calls(processes: Processes) -> list[str]:
    return (processes.folder / "calls.txt").read_text().splitlines()


def without_keys(processes: Processes) -> list[str]:
    return [re.sub(r"'[0-9a-f-]{36}'", "KEY", call) for call in calls(processes)]


def enqueue(dsn: str, kind: str, **args: Any) -> int:
    return SyncClient(dsn).enqueue(kind, args).id


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
async def test_the_agent_gives_the_same_answer_wherever_its_worker_is_killed(
    dsn: str, processes: Processes, at: int, when: str
) -> None:
    take(processes, "agent", "ask_model", "use_tool")
    job_id = enqueue(dsn, "answer", question="What do 3 boxes of 14 weigh?")
    first = await worker(processes, dsn, "agent_killed", KILL_AT=str(at), KILLED=when)
    assert await first.ended() == -signal.SIGKILL
    await worker(processes, dsn, "agent_killed")
    assert await settled(dsn, job_id) == ("completed", 2, "What do 3 boxes of 14 weigh? 43.5 kg")
    # Five steps, and the one that the worker died in once more: never one whose line was written.
    made = calls(processes)
    assert len(made) == 6
    assert made[at - 1] == made[at]
    assert len(set(made)) == 5


async def paid(dsn: str, processes: Processes, *more: str) -> int:
    """An order that waits for its approval."""
    take(processes, "order", "charge_card", "refund")
    job_id = enqueue(dsn, "order", order_id=42)
    await worker(processes, dsn, "order_killed", "--queues=default,packers", *more)
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE id = %(id)s AND state = 'suspended'", {"id": job_id})
    return job_id


async def test_an_order_that_is_approved_is_charged_once_and_completes_with_its_label(
    dsn: str, processes: Processes
) -> None:
    job_id = await paid(dsn, processes)
    SyncClient(dsn).send_event(job_id, "approved", {"by": "Ada"})
    state, _, result = await settled(dsn, job_id)
    assert (state, result) == ("completed", "label-42.pdf")
    assert without_keys(processes) == ["charge_card (42, KEY)"]
    assert rows(
        dsn, "SELECT kind, state::text FROM pulse.jobs WHERE parent_id = %(id)s ORDER BY 1", {"id": job_id}
    ) == [
        ("pack", "completed"),
        ("pack", "completed"),
        ("print_label", "completed"),
    ]


async def test_an_order_that_is_refused_is_refunded_once(dsn: str, processes: Processes) -> None:
    job_id = await paid(dsn, processes)
    SyncClient(dsn).send_event(job_id, "approved", {"by": "Ada", "yes": False})
    assert (await settled(dsn, job_id))[0] == "dead"
    assert without_keys(processes) == ["charge_card (42, KEY)", "refund ('charge-42',)"]


async def test_an_order_that_is_cancelled_while_it_waits_runs_once_more_and_is_refunded_once(
    dsn: str, processes: Processes
) -> None:
    job_id = await paid(dsn, processes)
    SyncClient(dsn).cancel(job_id)
    assert (await settled(dsn, job_id))[0] == "cancelled"
    assert without_keys(processes) == ["charge_card (42, KEY)", "refund ('charge-42',)"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_key_of_a_charge_is_the_same_after_a_crash_and_another_when_the_job_begins_anew(
    dsn: str, processes: Processes, when: str
) -> None:
    take(processes, "order", "charge_card", "refund")
    job_id = enqueue(dsn, "order", order_id=42)
    first = await worker(processes, dsn, "order_killed", "--queues=default,packers", KILL_AT="1", KILLED=when)
    assert await first.ended() == -signal.SIGKILL
    await worker(processes, dsn, "order_killed", "--queues=default,packers")
    waits = "SELECT 1 FROM pulse.jobs WHERE id = %(id)s AND state = 'suspended'"
    await until(dsn, waits, {"id": job_id})
    SyncClient(dsn).cancel(job_id)
    assert (await settled(dsn, job_id))[0] == "cancelled"
    SyncClient(dsn).retry(job_id)
    await until(dsn, waits, {"id": job_id})
    killed, again, refund, anew = calls(processes)
    assert killed == again
    assert refund == "refund ('charge-42',)"
    assert anew != again
    assert anew.startswith("charge_card (42, ")


async def test_a_fan_out_of_ten_thousand_is_cancelled_half_way_and_nothing_of_it_runs_on(
    dsn: str, processes: Processes
) -> None:
    shutil.copy(EXAMPLES / "resizes.py", processes.folder)
    job_id = enqueue(dsn, "resize_all", pictures=10_000)
    await worker(processes, dsn, "resizes", "--concurrency=10")
    # Ten at a time take ten seconds; the progress is a second or two behind. On a loaded machine the first ones end before the
    # last ones are written, and a job that is cancelled starts no more.
    await until(dsn, "SELECT 1 FROM pulse.durable_job WHERE job_id = %(id)s AND children = 10000", {"id": job_id})
    ((progress,),) = await until(
        dsn, "SELECT progress FROM pulse.jobs WHERE id = %(id)s AND progress > 0", {"id": job_id}
    )
    assert 0 < progress < 1
    SyncClient(dsn).cancel(job_id)
    assert (await settled(dsn, job_id))[0] == "cancelled"
    states = dict(
        rows(dsn, "SELECT state::text, count(*) FROM pulse.jobs WHERE parent_id = %(id)s GROUP BY 1", {"id": job_id})
    )
    assert set(states) == {"completed", "cancelled"}
    assert sum(states.values()) == 10_000
