"""Django's settings in the tests' own process: they can be given once, so every test that needs Django takes these."""

# Django has no types.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import django
import django.db.utils
import pytest
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from collections.abc import Generator

BACKEND = "pulse_trio.django.PulseBackend"

if not settings.configured:
    settings.configure(
        DATABASES={"default": {}},
        INSTALLED_APPS=["pulse_trio.django", "support.django_app"],
        SECRET_KEY="test",
        TASKS={"default": {"BACKEND": BACKEND, "QUEUES": []}},
        TIME_ZONE="UTC",
        USE_TZ=True,
    )
    django.setup()

_library: Any = import_module("django.tasks" if django.VERSION[0] >= 6 else "django_tasks")
task, task_backends = _library.task, _library.task_backends

__all__ = ["database", "task", "task_backends"]


class OtherBackend(import_module(f"{_library.__name__}.backends.base").BaseTaskBackend):
    """None of pulse-trio's."""

    def enqueue(self, *_: Any, **__: Any) -> Any: ...


@contextmanager
def database(dsn: str, alias: str = "default") -> Generator[Any]:
    """Django's connection of that alias leads to `dsn`."""
    from django.db import connections

    known = conninfo_to_dict(dsn)
    before = connections.databases.get(alias)
    connections.databases[alias] = connections.configure_settings(
        {
            "default": {},
            alias: {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": known["dbname"],
                "USER": known["user"],
                "PASSWORD": known.get("password", ""),
                "HOST": known["host"],
                "PORT": str(known.get("port", "")),
            },
        }
    )[alias]
    if hasattr(connections._connections, alias):
        del connections[alias]
    connection = connections[alias]
    try:
        try:
            connection.ensure_connection()
        except django.db.utils.NotSupportedError as error:
            pytest.skip(f"Django {django.get_version()}: {error}")
        yield connection
    finally:
        connection.close()
        del connections[alias]
        del connections.databases[alias]
        if before is not None:
            connections.databases[alias] = before
