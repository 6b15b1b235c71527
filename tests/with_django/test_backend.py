"""`PulseBackend`: what Django's documentation of tasks says, on real jobs, in Django's own transactions."""

# Django has no types.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test import override_settings
from django.utils import timezone

from pulse_trio import SyncClient
from pulse_trio.django import PulseBackend, finding
from pulse_trio.django.library import InvalidTask, TaskResultDoesNotExist, TaskResultStatus, signals
from pulse_trio.django.results import error_of
from pulse_trio.testing import PulseWorker
from support.django_app import tasks
from support.django_app.elsewhere import lost
from support.django_project import BACKEND, database, task_backends
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from support.databases import Databases


@pytest.fixture(scope="module")
def room(databases: Databases) -> Generator[Window]:
    # One for all: threads of workers keep what Django has told them of its database.
    with databases.migrated() as dsn, database(dsn), Window(dsn) as window:
        yield window


@pytest.fixture(autouse=True)
def window(room: Window) -> Window:
    room.run("TRUNCATE pulse.job, pulse.job_archive, pulse.attempt")
    return room


@pytest.fixture
def client() -> SyncClient:
    return SyncClient(task_backends["default"].dsn)


@contextmanager
def options(**given: Any) -> Generator[Any]:
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": given}}):
        yield task_backends["default"]


def drain(**settings: Any) -> dict[str, int]:
    backend = task_backends["default"]
    return dict(PulseWorker(backend.dsn, backend.handlers).drain_sync(**settings).ended)


def done(result: Any, **settings: Any) -> Any:
    drain(**settings)
    result.refresh()
    return result


# Enqueuing


def test_a_task_is_enqueued_if_and_only_if_the_transaction_commits(client: SyncClient) -> None:
    with transaction.atomic():
        kept = tasks.add.enqueue(1)
    with transaction.atomic():
        tasks.add.enqueue(2)
        with transaction.atomic():
            tasks.add.enqueue(3)
        transaction.set_rollback(True)
    assert [str(job.id) for job in client.jobs()] == [kept.id]


def test_what_enqueue_returns_is_what_get_result_finds() -> None:
    due = timezone.now() + timedelta(hours=1)
    for each in (
        tasks.add.enqueue(1, second=2),
        tasks.tells.enqueue(),
        tasks.add.using(priority=-100, queue_name="slow", run_after=due).enqueue(1),
        async_to_sync(tasks.anything.aenqueue)(b"bytes", (1, 2), a={"b": None}),
    ):
        assert each.status == TaskResultStatus.READY
        assert (each.attempts, each.errors, each.is_finished) == (0, [], False)
        assert each.task.get_result(each.id) == each
        with transaction.atomic():
            assert task_backends["default"].get_result(each.id) == each


def test_priority_queue_and_time_are_the_jobs(client: SyncClient) -> None:
    due = timezone.now() + timedelta(hours=1)
    result = tasks.add.using(priority=100, queue_name="mail", run_after=due).enqueue(1)
    job = client.job(int(result.id))
    assert (job.kind, job.queue, job.priority, job.run_at) == ("support.django_app.tasks.add", "mail", 100, due)
    assert drain() == {}


@pytest.mark.parametrize("first", [100, 1, 0, -99])
def test_the_higher_priority_runs_first(first: int) -> None:
    later, sooner = (tasks.add.using(priority=p).enqueue(1) for p in (first - 1, first))
    done(later, concurrency=1)
    sooner.refresh()
    assert sooner.started_at <= later.started_at
    assert sooner.finished_at <= later.finished_at


def test_a_naive_time_is_one_of_djangos_time_zone(client: SyncClient) -> None:
    with override_settings(USE_TZ=False):  # with TIME_ZONE Django would set the variable TZ, and leave it
        due = datetime(2040, 1, 1, 12)
        result = tasks.add.using(run_after=due).enqueue(1)
        assert task_backends["default"].get_result(result.id).task.run_after == due
    assert client.job(int(result.id)).run_at == timezone.make_aware(due)


@pytest.mark.parametrize(
    ("enqueue", "error", "said"),
    [
        (lambda: tasks.add.enqueue(object()), TypeError, "Unsupported type"),
        (lambda: tasks.add.enqueue("x" * 2_000_000), Exception, "the limit is 1,048,576"),
        (lambda: lost.enqueue(), InvalidTask, r"No worker would find support.django_app.elsewhere.lost: move it"),
        (lambda: tasks.add.using(queue_name="").enqueue(1), InvalidTask, "Queue name '' is not valid"),
        (lambda: tasks.add.using(priority=101), InvalidTask, "between -100 and 100"),
    ],
)
def test_what_is_refused_leaves_the_transaction_as_it_was(
    enqueue: Any, error: type[Exception], said: str, client: SyncClient
) -> None:
    with transaction.atomic():
        with pytest.raises(error, match=said):
            enqueue()
        kept = tasks.add.enqueue(1)
    assert [str(job.id) for job in client.jobs()] == [kept.id]


def test_a_module_that_the_options_name_has_tasks_too() -> None:
    for name in ("elsewhere", "support.django_app.elsewhere"):
        with options(modules=[name]):
            assert done(lost.enqueue()).status == TaskResultStatus.SUCCESSFUL


def test_a_module_in_no_package_is_said_to_need_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error advised `modules: ['top_level_tasks']`, which was there already and means a module of each app."""
    (tmp_path / "top_level_tasks.py").write_text(
        "from support.django_project import task\n\n\n@task\ndef add(a, b):\n    return a + b\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    top_level = import_module("top_level_tasks")
    with options(modules=["top_level_tasks"]) as backend:
        with pytest.raises(InvalidTask) as refused:
            top_level.add.enqueue(1, 2)
        (found,) = backend.check()
    said = str(refused.value)
    assert "its module into a package and name that, as in 'modules': ['package.top_level_tasks']" in said
    assert "'top_level_tasks' alone would mean a module top_level_tasks of each installed app" in said
    assert found.id == "pulse_trio.W002"
    assert found.msg == (
        "TASKS['default']: no installed app has a module 'top_level_tasks', which the option modules names."
    )


def test_a_task_that_its_named_module_does_not_have_is_said_to_be_missing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = import_module("support.django_app.elsewhere")
    monkeypatch.delattr(module, "lost")
    finding._found.cache_clear()
    said = "elsewhere is among the 'modules' of OPTIONS, but has no such task"
    with options(modules=["support.django_app.elsewhere"]), pytest.raises(InvalidTask, match=said):
        lost.enqueue()
    finding._found.cache_clear()


# Running


def test_a_worker_runs_it_and_the_result_can_be_read() -> None:
    result = done(tasks.anything.enqueue(1, "two", three=[4]))
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.return_value == [[1, "two"], {"three": [4]}]
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert (result.attempts, len(result.worker_ids), result.errors) == (1, 1, [])


def test_a_coroutine_function_gets_its_context() -> None:
    result = done(async_to_sync(tasks.tells.aenqueue)())
    assert result.return_value == {"id": result.id, "attempt": 1, "status": "RUNNING"}


@pytest.mark.parametrize(
    ("task", "args", "path", "last_line"),
    [
        (tasks.fails, ["gone"], "builtins.LookupError", "LookupError: gone\n"),
        (
            tasks.fails_on_asyncio,
            [],
            "support.django_app.tasks.ExceptionOfTheAppError",
            "support.django_app.tasks.ExceptionOfTheAppError: as it must\n",
        ),
        (tasks.exits, [], "builtins.SystemExit", "SystemExit: and no further\n"),
        (tasks.add, [], "builtins.TypeError", "add() missing 1 required positional argument: 'first'\n"),
        (tasks.returns_what_json_does_not_have, [], "builtins.TypeError", "Unsupported type: <class 'object'>\n"),
    ],
)
def test_an_exception_is_the_end_of_it_as_in_djangos_own_backends(
    task: Any, args: list[Any], path: str, last_line: str
) -> None:
    result = done(task.enqueue(*args))
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    (error,) = result.errors
    assert error.exception_class_path == path
    assert error.exception_class.__name__ == path.rpartition(".")[2]
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert error.traceback.endswith(last_line)
    assert "asgiref" not in error.traceback
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


def test_with_retries_it_is_tried_again_up_to_max_attempts() -> None:
    with options(retries=True, max_attempts=2):
        result = tasks.fails.enqueue("still")
        drain()
        result.refresh()
        if not result.is_finished:  # the pause before the second attempt is drawn
            SyncClient(task_backends["default"].dsn).retry(int(result.id))
        done(result)
    assert (result.status, result.attempts, len(result.errors)) == (TaskResultStatus.FAILED, 2, 2)


def test_a_later_attempt_knows_those_before() -> None:
    result = done(tasks.fails_once.enqueue())
    assert result.return_value == [2, 1, 2]
    assert (result.attempts, len(result.errors)) == (2, 1)
    assert done(tasks.snoozes_once.enqueue()).return_value == 2


def test_a_cancelled_task_has_failed(client: SyncClient) -> None:
    result = tasks.add.enqueue(1)
    client.cancel(int(result.id), reason="not needed")
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    (error,) = result.errors
    assert (error.exception_class.__name__, error.traceback) == ("JobCancelled", "JobCancelled: not needed\n")


def test_a_task_that_was_cancelled_as_it_ran_says_so_too(client: SyncClient, window: Window) -> None:
    """It said `JobFailed`, with the reason as its traceback."""
    result = tasks.add.enqueue(1)
    window.run("UPDATE job SET attempt = 1 WHERE id = %s", int(result.id))
    window.run(
        "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome, error)"
        " VALUES (%s, 1, 1, now(), now(), 'cancelled', 'not needed')",
        int(result.id),
    )
    client.cancel(int(result.id), reason="not needed")
    result.refresh()
    (error,) = result.errors
    assert (error.exception_class.__name__, error.traceback) == ("JobCancelled", "JobCancelled: not needed\n")


@pytest.mark.parametrize("in_callers", [False, True])
def test_a_receiver_that_raises_leaves_no_task_that_its_caller_does_not_know_of(
    in_callers: bool, client: SyncClient
) -> None:
    """Outside of `atomic()` it was committed, and who tried again had two."""

    def refuses(**_: object) -> None:
        raise ValueError("no")

    signals.task_enqueued.connect(refuses)
    try:
        with transaction.atomic() if in_callers else nullcontext():
            with pytest.raises(ValueError, match="no"):
                tasks.add.enqueue(1)
            # The caller's transaction is as it was, and goes on.
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
    finally:
        signals.task_enqueued.disconnect(refuses)
    assert len(client.jobs()) == in_callers


def test_each_task_in_a_thread_begins_without_a_connection_of_the_one_before() -> None:
    results = [tasks.finds_a_connection.enqueue() for _ in range(3)]
    assert [done(result, concurrency=1).return_value for result in results] == [False] * 3


def test_djangos_signals_are_sent_around_it() -> None:
    told: list[tuple[str, str, Any]] = []

    def hear(name: str, signal: Any) -> Any:
        def receiver(sender: Any, task_result: Any, **_: Any) -> None:
            told.append((name, task_result.id, task_result.status))
            assert sender is PulseBackend
            if name == "finished":
                assert (sys.exc_info()[0] is not None) == (task_result.status == TaskResultStatus.FAILED)
                raise ZeroDivisionError("in a receiver, which costs the task nothing")

        signal.connect(receiver)
        return receiver

    heard = {name: hear(name, getattr(signals, f"task_{name}")) for name in ("enqueued", "started", "finished")}
    try:
        good = done(tasks.add.enqueue(1))
        bad = done(tasks.fails.enqueue("no"))
        again = done(tasks.fails_once.enqueue())
    finally:
        for name, receiver in heard.items():
            getattr(signals, f"task_{name}").disconnect(receiver)
    ended = [("enqueued", "READY"), ("started", "RUNNING")]
    assert [(n, s) for n, i, s in told if i == good.id] == [*ended, ("finished", "SUCCESSFUL")]
    assert [(n, s) for n, i, s in told if i == bad.id] == [*ended, ("finished", "FAILED")]
    assert [(n, s) for n, i, s in told if i == again.id] == [*ended, ended[1], ("finished", "SUCCESSFUL")]
    assert good.status == TaskResultStatus.SUCCESSFUL


# Rows of strangers


def test_a_row_cannot_name_what_is_imported_or_called(window: Window) -> None:
    for kind in ("os.getcwd", "antigravity.open", "support.django_app.elsewhere.lost", "support.django_app.tasks.task"):
        job_id = window.enqueue("default", kind=kind, args={"args": [], "kwargs": {}})
        with pytest.raises(TaskResultDoesNotExist):
            task_backends["default"].get_result(str(job_id))
    with pytest.raises(LookupError, match="jobs of a kind without a handler here"):
        drain()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "args", [{}, {"args": 1, "kwargs": {}}, {"args": [], "kwargs": []}, {"args": [], "kwargs": {}, "func": "os.abort"}]
)
def test_a_row_with_other_arguments_harms_itself_alone(args: dict[str, Any], window: Window) -> None:
    job_id = window.enqueue("default", kind="support.django_app.tasks.anything", args=args)
    assert done(tasks.add.enqueue(1)).return_value == 1
    assert window.state(job_id) != "completed"


def test_an_error_text_cannot_choose_an_import() -> None:
    error = error_of("Evil: x\n\nTraceback (most recent call last):\nantigravity.Evil: x")
    assert error.exception_class_path == "antigravity.Evil"
    with pytest.raises(ImportError, match="is nothing that this process has imported"):
        _ = error.exception_class
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("job_id", ["", "x", "1.0", "-1", "٣", "9" * 30, "999999", "123; DROP TABLE"])
def test_an_id_that_no_task_has_does_not_exist(job_id: str) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["default"].get_result(job_id)
    with pytest.raises(TaskResultDoesNotExist):
        async_to_sync(tasks.add.aget_result)(job_id)


# Settings


def ids_of(backend: Any) -> list[str]:
    return [message.id for message in backend.check()]


def test_good_settings_pass_the_checks() -> None:
    assert ids_of(task_backends["default"]) == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"data_base": "default"}, ["pulse_trio.E001"]),
        ({"database": "nowhere"}, ["pulse_trio.E002"]),
        ({"handlers": "support.django_app.tasks.add"}, ["pulse_trio.E006"]),
        ({"handlers": "no.such.module"}, ["pulse_trio.E006"]),
        ({"modules": ["no.such.module"]}, ["pulse_trio.E006"]),
        ({"modules": ["elsewhere"]}, []),
        ({"modules": ["elsewhere", "no_such_module"]}, ["pulse_trio.W002"]),
        ({"max_attempts": 0}, ["pulse_trio.E006"]),
    ],
)
def test_a_wrong_option_is_named_by_the_checks(given: dict[str, Any], found: list[str]) -> None:
    with options(**given) as backend:
        assert ids_of(backend) == found


def test_two_backends_on_one_schema_are_refused_by_the_checks() -> None:
    one = {"BACKEND": BACKEND, "QUEUES": ["default", "bad\nname"]}
    with override_settings(TASKS={"default": one, "other": one}):
        assert ids_of(task_backends["default"]) == ["pulse_trio.E004"]
        assert ids_of(task_backends["other"]) == ["pulse_trio.E004", "pulse_trio.E005"]


def test_a_project_without_the_app_is_told() -> None:
    with override_settings(INSTALLED_APPS=["support.django_app"]):
        assert ids_of(task_backends["default"]) == ["pulse_trio.W001"]
