"""`manage.py pulse_migrate`: brings pulse-trio's schema up to date, where `manage.py migrate` is not to do it."""

# pyright: basic
# Django has no types.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError

from pulse_trio.cli.faults import describe
from pulse_trio.django.backend import backend_named
from pulse_trio.errors import PulseTrioError
from pulse_trio.migrate import check_sync, migrate_sync

if TYPE_CHECKING:
    from argparse import ArgumentParser


class Command(BaseCommand):
    """Takes the backend's alias in TASKS, and `--check`."""

    help = "Bring pulse-trio's schema up to date in the database of a task backend."
    requires_system_checks: tuple[str, ...] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Adds what the command takes."""
        parser.add_argument(
            "--backend", default="default", metavar="ALIAS", help="The backend in TASKS.  [default: default]"
        )
        parser.add_argument("--check", action="store_true", help="Change nothing; fail if migrations are missing.")

    def handle(self, *_: Any, backend: str, check: bool, **__: Any) -> None:
        """Migrates, or checks."""
        try:
            chosen = backend_named(backend)
            if check:
                check_sync(chosen.dsn, chosen.schema)
                self.stdout.write(f"The schema {chosen.schema} is up to date.")
                return
            for name in migrate_sync(chosen.dsn, chosen.schema) or ["nothing to do"]:
                self.stdout.write(name)
        except PulseTrioError as error:
            raise CommandError(describe(error)) from None
