"""Runs the test suites that Django and django-tasks have for their own backends against `PulseBackend`:

    python tests/with_django/suites.py django PATH           # Django's source distribution, unpacked
    python tests/with_django/suites.py django_tasks PATH     # a checkout of django-tasks of the installed version

Nothing of theirs is kept here. The suites are copied into a temporary folder, and three names in them are replaced: their
DummyBackend, which keeps what is enqueued, by a `PulseBackend` without a worker; their ImmediateBackend by one whose `enqueue`
lets a worker run what is due; and SimpleTestCase, which forbids databases, by TransactionTestCase.

Exit code 0: all that apply pass. `DESELECTED` says which do not apply, and why.
"""

# Django has no types.
# pyright: basic

from __future__ import annotations

import os
import re
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

LIBRARIES = {
    "django": ("django.tasks", "tests/tasks", "tasks"),
    "django_tasks": ("django_tasks", "tests", "tests"),
}
"""The library, where its suite is, and as which package the suite must be imported."""

OWN = "it is about a backend that the suite brings itself, or about the library alone"
DESELECTED = {
    "CustomBackendTestCase": OWN,
    "CustomTaskTestCase": OWN,
    "DjangoCompatTestCase": OWN,
    "test_cannot_get_result": "ImmediateBackend has no results; PulseBackend has",
    "test_cannot_refresh_result": "ImmediateBackend has no results; PulseBackend has",
    "test_cannot_pass_run_after": "ImmediateBackend cannot wait; PulseBackend can",
    "ImmediateBackendTestCase.test_get_result_from_different_request": "ImmediateBackend has no results; PulseBackend has",
    "ImmediateBackendTransactionTestCase": "a worker finds a task when its transaction has committed",
    "DummyBackendTestCase.test_refresh_result": "it changes the objects that DummyBackend keeps in memory",
    "DummyBackendTestCase.test_refresh_result_async": "it changes the objects that DummyBackend keeps in memory",
    "test_throws_keyboard_interrupt": "the task does not run in the process that enqueues it",
}


def main() -> int:
    """Runs one suite; returns the exit code."""
    name, source = sys.argv[1], Path(sys.argv[2])
    library, folder, package = LIBRARIES[name]
    from pulse_trio.embedded import embedded_server

    with tempfile.TemporaryDirectory() as made, embedded_server(Path(made) / "pg") as server:
        os.chmod(made, 0o711)  # noqa: S103 -- where root runs PostgreSQL as `nobody`, who has to come through
        copy(source / folder, Path(made) / package, library)
        sys.path[:0] = [made, str(Path(__file__).parent.resolve())]
        os.chdir(made)
        # The suites call blocking functions in coroutines, which Django refuses for those that use a database.
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
        set_up(server.dsn, package)
        return run(package)


def copy(source: Path, target: Path, library: str) -> None:
    """The suite with the three names replaced."""
    for file in source.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file.name != "test_compat.py":
            text = text.replace(f"{library}.backends.dummy.DummyBackend", "suite_backends.DummyBackend")
            text = text.replace(f"{library}.backends.immediate.ImmediateBackend", "suite_backends.ImmediateBackend")
            text = re.sub(rf"from {library}\.backends\.(dummy|immediate) import", "from suite_backends import", text)
            text = re.sub(r"\bSimpleTestCase\b", "TransactionTestCase", text)
            # The suite's own app stays installed: the tasks are looked for in it.
            text = text.replace("available_apps = []", "")
        copied = target / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(text, encoding="utf-8")


def set_up(dsn: str, package: str) -> None:
    """Django with the suite as an installed app."""
    import django
    from django.conf import settings
    from psycopg.conninfo import conninfo_to_dict

    known = conninfo_to_dict(dsn)
    contrib = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages"]
    settings.configure(
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": known["dbname"],
                "USER": known["user"],
                "HOST": known["host"],
                "PORT": known.get("port", ""),
            }
        },
        INSTALLED_APPS=[*contrib, "django.contrib.sessions", "pulse_trio.django", package],
        ROOT_URLCONF=f"{package}.urls" if package == "tests" else "django.contrib.staticfiles.urls",
        SECRET_KEY="suite",
        TASKS={"default": {"BACKEND": "suite_backends.DummyBackend"}},  # so that the test's database has the schema
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
        USE_TZ=True,
    )
    django.setup()


def run(package: str) -> int:
    """Runs what applies, and says how many of how many pass."""
    from django.test.runner import DiscoverRunner

    chosen: list[str] = []

    class Runner(DiscoverRunner):
        def run_checks(self, databases: Any) -> None:
            """The settings have what the suites need, not what an administration's pages would."""

        def teardown_databases(self, *_: Any, **__: Any) -> None:
            """The server ends, and its folder is removed. Threads of the suites' event loops may still be connected."""

        def build_suite(self, *args: Any, **given: Any) -> Any:
            suite = super().build_suite(*args, **given)
            every = list(flat(suite))
            taken = [test for test in every if why_not(test.id()) is None]
            chosen.extend(test.id() for test in every)
            return unittest.TestSuite(taken)

        def suite_result(self, suite: Any, result: Any, **given: Any) -> Any:
            bad = len({str(test).partition(" [")[0] for test, _ in [*result.failures, *result.errors]})
            left_out = len(chosen) - result.testsRun
            said = [f"{result.testsRun - bad} of {len(chosen)} pass, {bad} fail, {left_out} do not apply:"]
            said += [f"  {each}: {reason}" for each in chosen if (reason := why_not(each)) is not None]
            sys.stdout.write("\n".join(said) + "\n")
            return super().suite_result(suite, result, **given)

    return Runner(verbosity=1, interactive=False).run_tests([package])


def why_not(test: str) -> str | None:
    """Why a test does not apply; None if it does."""
    return next((DESELECTED[name] for name in DESELECTED if test.endswith(f".{name}") or f".{name}." in test), None)


def flat(suite: Any) -> Any:
    """The tests of a suite of suites."""
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from flat(each)
        else:
            yield each


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
