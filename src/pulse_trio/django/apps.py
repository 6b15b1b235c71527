"""The Django app: brings the schema up to date at the end of `manage.py migrate`."""

# pyright: basic
# Django has no types.

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.core import checks
from django.db.models.signals import post_migrate


class PulseTrioConfig(AppConfig):
    """`"pulse_trio.django"` in INSTALLED_APPS."""

    name = "pulse_trio.django"
    label = "pulse_trio"
    verbose_name = "pulse-trio"

    def ready(self) -> None:
        """Django has read the settings."""
        post_migrate.connect(_migrate, sender=self)
        from .library import LIBRARY

        if LIBRARY == "django_tasks" and not apps.is_installed("django_tasks"):
            # Otherwise, as with Django's own tasks, the library has its backends checked.
            checks.register(_check_backends)


def _check_backends(**_: Any) -> list[Any]:
    from .library import task_backends

    return [message for backend in task_backends().all() for message in backend.check()]


def _migrate(using: str, verbosity: int = 1, **given: Any) -> None:
    # `flush`, which ends Django's tests, sends the same signal without a plan.
    if "plan" not in given:
        return
    from ..migrate import migrate_sync
    from .backend import PulseBackend
    from .library import task_backends

    for backend in task_backends().all():
        if isinstance(backend, PulseBackend) and backend.database == using and backend.migrates:
            applied = migrate_sync(backend.dsn, backend.schema)
            if applied and verbosity >= 1:
                print(f"  pulse-trio: {len(applied)} migrations applied to the schema {backend.schema}")  # noqa: T201
