"""`manage.py pulse_worker`: `pulse-trio run` for the project's tasks, with Django's settings."""

# pyright: basic
# Django has no types.

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click
from django.core.management.base import BaseCommand, CommandError

from pulse_trio.cli.application import status_of
from pulse_trio.cli.run import run
from pulse_trio.django.backend import backend_named
from pulse_trio.errors import PulseTrioError

if TYPE_CHECKING:
    from argparse import ArgumentParser

TARGET = "pulse_trio.django.handlers"


class Command(BaseCommand):
    """Takes the options of `pulse-trio run`, and `--backend`."""

    help = "Run a worker for the tasks of this project. The options are those of pulse-trio run."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Adds the options of `run`, as click has them."""
        parser.add_argument(
            "--backend", default="default", metavar="ALIAS", help="The backend in TASKS.  [default: default]"
        )
        for option in _options():
            taken: dict[str, Any] = {
                "dest": option.name,
                "help": (option.help or "").replace("%", "%%"),
                "default": None,
            }
            if option.is_flag:
                taken |= {"action": "store_true", "default": False}
            else:
                taken |= {"metavar": option.metavar, "action": "append" if option.multiple else "store"}
            parser.add_argument(*option.opts, **taken)

    def handle(self, *_: Any, backend: str, **given: Any) -> None:
        """Runs the worker, and exits with its code."""
        try:
            chosen = backend_named(backend)
        except PulseTrioError as error:
            raise CommandError(str(error)) from None
        os.environ["PULSE_TRIO_DJANGO_BACKEND"] = chosen.alias
        os.environ["PULSE_TRIO_SCHEMA"] = chosen.schema
        os.environ.setdefault("PULSE_TRIO_DSN", chosen.dsn)
        # A worker's further processes have to find the modules that this one finds.
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        arguments = ["run", TARGET, *_arguments(given)]
        if given["reload"]:
            # It starts the command that stands here in a process of its own, again and again.
            sys.argv = ["pulse-trio", *arguments]
        code = status_of(arguments)
        if code:
            sys.exit(code)


def _options() -> list[click.Option]:
    return [each for each in run.params if isinstance(each, click.Option) and each.name != "help"]


def _arguments(given: dict[str, Any]) -> list[str]:
    """The options that were given, as a command line."""
    line: list[str] = []
    for option in _options():
        value = given.get(option.name or "")
        if option.is_flag:
            line += [option.opts[0]] if value else []
        else:
            for each in value if isinstance(value, list) else [value] if value is not None else []:
                line += [option.opts[0], str(each)]
    return line
