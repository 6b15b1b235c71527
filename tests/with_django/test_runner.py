"""The test runner of docs/how-to/django.md with Django's options, and the kit inside of a TestCase's own transaction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pulse_trio.testing import pulse_database

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

PAGE = Path(__file__).parents[2] / "docs/how-to/django.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
EVENTS = """
import os
import unittest

import project
from django.db import connection, transaction
from django.test import TestCase
from jobs import send_welcome
from pulse_trio import SyncClient
from pulse_trio.testing import assert_enqueued, pulse_database, refute_enqueued


def approve(test, jobs):
    job = jobs.enqueue(send_welcome, 7)
    test.assertEqual(assert_enqueued(jobs, send_welcome, args={"account_id": 7}).id, job.id)
    test.assertTrue(jobs.send_event(job.id, "approved", "Ada", event_key="once"))
    test.assertFalse(jobs.send_event(job.id, "approved", "Ada", event_key="once"))


class InDjango(TestCase):
    def test_an_event_is_sent_in_the_tests_transaction(self):
        jobs = project.jobs.using(connection)
        with transaction.atomic():
            approve(self, jobs)
            transaction.set_rollback(True)
        refute_enqueued(jobs, send_welcome)
        approve(self, jobs)


class InUnittest(unittest.TestCase):
    def test_an_event_is_sent_in_the_tests_transaction(self):
        import psycopg

        dsn = self.enterContext(pulse_database(os.environ['DATABASE_URL']))
        with psycopg.connect(dsn) as own:
            approve(self, SyncClient(dsn).using(own))
            refute_enqueued(SyncClient(dsn), send_welcome)
            own.rollback()
        refute_enqueued(SyncClient(dsn), send_welcome)
"""
RUN = """
import os
import sys

os.environ["DATABASE_URL"] = sys.argv[1]

from tests import Runner

if __name__ == "__main__":  # multiprocessing imports it in each process, where it does not fork
    for given in ({"keepdb": True}, {"keepdb": True}, {"keepdb": True, "parallel": 2}, {"parallel": 2}):
        runner = Runner(verbosity=0, interactive=False, **given)
        failed = runner.run_tests(["tests", "events"])
        print(given, "failed:", failed, "processes:", runner.parallel)
"""


@pytest.mark.trio
async def test_the_pages_runner_works_in_parallel_and_on_a_kept_database_and_the_kit_in_a_tests_transaction(
    processes: Processes,
) -> None:
    for name, body in FILE.findall(PAGE.read_text()):
        (processes.folder / name).write_text(body)
    (processes.folder / "events.py").write_text(EVENTS)
    (processes.folder / "run_all.py").write_text(RUN)
    with pulse_database() as dsn:
        done = await processes.python("run_all.py", dsn)
        assert await done.ended(within=120) == 0, done.report()
    said = [line for line in done.stdout.splitlines() if "failed:" in line]
    assert len(said) == 4, done.report()
    assert all("failed: 0" in line for line in said), done.report()
    assert [line.endswith("processes: 2") for line in said] == [False, False, True, True], said
