"""`manage.py pulse_worker` and `pulse_migrate`. That they run in a project, docs/how-to/django-tasks.md shows."""

# Django has no types.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import sys
from io import StringIO
from typing import TYPE_CHECKING

import psycopg
import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import override_settings
from django.utils.log import configure_logging

import pulse_trio.django
from pulse_trio.django.management.commands import pulse_worker
from support.django_project import BACKEND, database

if TYPE_CHECKING:
    from collections.abc import Generator


def test_the_workers_options_are_those_of_run() -> None:
    parser = pulse_worker.Command().create_parser("manage.py", "pulse_worker")
    given = ["--queues", "a,b", "--burst", "--grace=3", "--instrument", "m:a", "--instrument", "m:b"]
    line = pulse_worker._arguments(vars(parser.parse_args(given)))
    taken = pulse_worker.run.make_context("run", ["app", *line]).params
    assert (taken["queues"], taken["burst"], taken["grace"]) == (("a", "b"), True, 3.0)
    assert taken["instruments"] == ("m:a", "m:b")
    assert pulse_worker._arguments(vars(parser.parse_args([]))) == []


@pytest.mark.parametrize("command", ["pulse_worker", "pulse_migrate"])
def test_a_backend_that_is_none_of_ours_is_refused_with_those_that_are(command: str) -> None:
    dummy = {"BACKEND": "support.django_project.OtherBackend"}
    with (
        override_settings(TASKS={"default": {"BACKEND": BACKEND}, "other": dummy}),
        pytest.raises(CommandError, match=r"TASKS\['other'\] does not use .*; these do: default\."),
    ):
        call_command(command, backend="other")


OWN_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"own": {"class": "logging.StreamHandler"}},
    "loggers": {"django": {"handlers": ["own"]}},
}


@pytest.mark.parametrize(("log", "lines"), [({}, 1), (OWN_LOG, 2)])
def test_a_worker_prints_a_line_of_django_once_unless_the_projects_own_log_prints_it_too(
    log: dict[str, object], lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from pulse_trio.django.handlers import (
        leave_djangos_lines_to_the_worker,
    )  # it needs the settings, which are made above

    root, ours = logging.getLogger(), logging.StreamHandler(sys.stderr)
    try:
        with override_settings(DEBUG=True, LOGGING=log):
            configure_logging(settings.LOGGING_CONFIG, settings.LOGGING)
            leave_djangos_lines_to_the_worker()
            root.addHandler(ours)
            logging.getLogger("django.tasks").error("a line of Django's")
    finally:
        root.removeHandler(ours)
        configure_logging(settings.LOGGING_CONFIG, settings.LOGGING)
    assert capsys.readouterr().err.splitlines().count("a line of Django's") == lines


@pytest.fixture
def unmigrated(empty_dsn: str) -> Generator[str]:
    with database(empty_dsn):
        yield empty_dsn


def test_the_schema_is_checked_and_made(unmigrated: str) -> None:
    with pytest.raises(CommandError, match="has no pulse-trio schema 'pulse'"):
        call_command("pulse_migrate", check=True)
    said = StringIO()
    call_command("pulse_migrate", stdout=said)
    assert "0001_jobs\n" in said.getvalue()
    call_command("pulse_migrate", check=True, stdout=said)
    call_command("pulse_migrate", stdout=said)
    assert said.getvalue().endswith("The schema pulse is up to date.\nnothing to do\n")


@pytest.mark.parametrize("migrates", [True, False])
def test_migrate_makes_the_schema_unless_the_options_say_no(unmigrated: str, migrates: bool) -> None:
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"migrate": migrates}}}):
        call_command("migrate", verbosity=0)
    with psycopg.connect(unmigrated) as connection:
        found = connection.execute("SELECT to_regnamespace('pulse') IS NOT NULL").fetchone()
    assert found == (migrates,)


def test_without_django_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "django", None)
    with pytest.raises(ImportError, match=r"pip install 'pulse-trio\[django\]'"):
        _ = pulse_trio.django.PulseBackend
