"""A Trio that lacks what a worker stands on is refused at import, by name and version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trio

import pulse_trio
from pulse_trio import trio_internals
from pulse_trio.postgres import contract

SOURCE = Path(pulse_trio.__file__).parent

TAKEN = {
    "del trio.lowlevel.Task._child_nurseries": "Task._child_nurseries is gone",
    "trio.Nursery.__init__ = lambda self, scope: None": (
        "Nursery._cancel_status is gone, Nursery._closed is gone, Nursery._parent_waiting_in_aexit is gone"
    ),
    "del trio._core._run.unrolled_run": "trio._core._run.unrolled_run with its local `task` is gone",
    "trio._core._run.unrolled_run = print": "trio._core._run.unrolled_run with its local `task` is gone",
    "del trio._core._ki.KIManager": "trio._core._ki.KIManager is gone",
    "del sys.modules['trio._core._ki']": "trio._core._ki.KIManager is gone",
    "del sys.modules['trio._threads'].PARENT_TASK_DATA": "trio._threads.PARENT_TASK_DATA with its four names is gone",
    "del type(trio._threads.PARENT_TASK_DATA).__annotations__['token']": (
        "trio._threads.PARENT_TASK_DATA with its four names is gone"
    ),
    "del trio._threads.RunSync.run_sync": "trio._threads.Run.run and RunSync.run_sync is gone",
}


def imported_after(change: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys, trio\n{change}\nimport pulse_trio.worker.jobs.task_pool as places\nprint(None in places._OWNERS)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("change", TAKEN)
def test_what_is_gone_is_named_at_import_with_the_versions(change: str) -> None:
    done = imported_after(change)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"pulse_trio.trio_internals.TrioContractError: trio {trio.__version__} differs")
    assert f"({trio_internals.SUPPORTED}; tried with {trio_internals.TRIED}): {TAKEN[change]}." in said


def test_where_trio_does_not_say_who_holds_a_lock_every_task_may() -> None:
    assert imported_after("").stdout == "False\n"
    assert imported_after("del trio._core._parking_lot.GLOBAL_PARKING_LOT_BREAKER").stdout == "True\n"


IN_ORDER = """
import trio
import trio.testing
from pulse_trio.trio_internals import keep_order

async def started(note):
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(note, number)

async def told(note):
    event = trio.Event()
    async def waits(number):
        await event.wait()
        await note(number)
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(waits, number)
        await trio.testing.wait_all_tasks_blocked()
        event.set()

async def cancelled(note):
    async def is_cut(number):
        try:
            await trio.sleep_forever()
        finally:
            await note(number)
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(is_cut, number)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

async def main():
    for way in (started, told, cancelled):
        orders = set()
        for _ in range(30):
            order = []
            async def note(number):
                order.append(number)
            await way(note)
            orders.add(tuple(order))
        print(way.__name__, orders == {tuple(range(10))})

trio.run(main)
keep_order()
trio.run(main)
"""


def test_tasks_go_on_in_the_order_in_which_they_were_started() -> None:
    """In a process of its own, where Hypothesis is not."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", IN_ORDER], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    ways = ("started", "told", "cancelled")
    assert done.stdout.splitlines() == [f"{way} {kept}" for kept in (False, True) for way in ways]


IN_BLOCKS = """
import sys
from pulse_trio import trio_internals
from pulse_trio.trio_internals import keep_order, order_kept

run = sys.modules["trio._core._run"]

def kept():
    return run._ALLOW_DETERMINISTIC_SCHEDULING, "shuffle" in vars(run._r)

print(kept())
with order_kept():
    with order_kept():
        print(kept())
    print(kept())
print(kept())
with order_kept():
    keep_order()
print(kept())
"""


def test_the_order_is_kept_while_a_block_is_open_and_drawn_again_afterwards() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", IN_BLOCKS], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    drawn, kept = "(False, False)", "(True, True)"
    assert done.stdout.splitlines() == [drawn, kept, kept, drawn, kept]


def test_a_trio_that_draws_the_order_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = object()
    monkeypatch.setattr(sys.modules["trio._core._run"], "_r", elsewhere)
    trio_internals.keep_order()
    with trio_internals.order_kept():
        pass
    monkeypatch.delattr(sys.modules["trio._core._run"], "_r")
    trio_internals.keep_order()
    with trio_internals.order_kept():
        pass


def test_the_private_side_of_trio_is_named_in_one_file() -> None:
    named = re.compile(r"(?<!pulse_)trio\._|_child_nurseries|GLOBAL_PARKING_LOT_BREAKER")
    found = {path.name for path in SOURCE.rglob("*.py") if named.search(path.read_text(encoding="utf-8"))}
    assert found == {"trio_internals.py"}


def test_the_versions_in_the_errors_are_those_of_the_project() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert trio_internals.SUPPORTED in project["dependencies"]
    assert contract.SUPPORTED.replace("psycopg", "psycopg[binary]") in project["dependencies"]
