"""Options that commands share. The worker's options and their help are made from the fields of `WorkerSettings`."""

from __future__ import annotations

import getpass
import math
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ..errors import ConfigurationError
from ..setting_types import is_list
from ..settings import WorkerSettings, parse_setting

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import Field

F = TypeVar("F", bound="Callable[..., Any]")


class WholeNumber(click.IntRange):
    """A range of whole numbers, which click calls a "valid integer range" where it refuses a text."""

    name = "whole number"


class Number(click.FloatRange):
    """The same of numbers. NaN is in no range, which click does not see."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def flag_of(name: str) -> str:
    """`--connect-timeout` for `connect_timeout`."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """`PULSE_TRIO_CONNECT_TIMEOUT` for `connect_timeout`."""
    return f"PULSE_TRIO_{name.upper()}"


def default_of(field: Field[Any]) -> str:
    """A setting's default as the help shows it."""
    if field.default is None:
        return "all"
    if field.default in ("", ()):
        return "none"
    if is_list(field):
        return ",".join(cast("tuple[str, ...]", field.default))
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _metavar(field: Field[Any]) -> str:
    if "metavar" in field.metadata:
        return field.metadata["metavar"]
    if is_list(field):
        return "A,B,..."
    if field.name.endswith("dsn"):
        return "DSN"
    match field.default:
        case int():
            return "NUMBER"
        case float():
            return "SECONDS"
        case _:
            return "NAME"


def setting_options(*, only: str | None = None) -> Callable[[F], F]:
    """A decorator: adds an option for each setting, or for one. An option that is not given is None: `load_settings`
    decides."""
    chosen = [f for f in fields(WorkerSettings) if only in (None, f.name)]

    def decorate(command: F) -> F:
        for field in reversed(chosen):
            command = _setting_option(field)(command)
        return command

    return decorate


def _setting_option(field: Field[Any]) -> Callable[[F], F]:
    def parse(text: str) -> Any:
        # Parsed like the values of the environment and the file.
        try:
            return parse_setting(field.name, text, flag_of(field.name))
        except ConfigurationError as error:
            raise click.UsageError(str(error), click.get_current_context(silent=True)) from None

    return click.option(
        flag_of(field.name),
        type=parse,
        metavar=_metavar(field),
        help=f"{field.metadata['help']}  [{variable_of(field.name)}; default: {default_of(field)}]",
    )


dsn_option = click.option(
    "--dsn",
    metavar="DSN",
    help="The database, as libpq takes it: postgresql://user@host:5432/name.  [PULSE_TRIO_DSN, DATABASE_URL; default: "
    "an embedded PostgreSQL]",
)
schema_option = setting_options(only="schema")


def _keep_actor(context: click.Context, _: click.Parameter, name: str | None) -> None:
    context.meta[_ACTOR] = name


_ACTOR = "pulse_trio.actor"
actor_option = click.option(
    "--as",
    metavar="NAME",
    expose_value=False,
    callback=_keep_actor,
    help="Your name in the audit trail.  [default: the user of the operating system]",
)


def chosen_actor() -> str:
    """The actor that the audit trail records for this command."""
    context = click.get_current_context(silent=True)
    if context is not None and (given := context.meta.get(_ACTOR)):
        return given
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container's user need not have a name.
        return f"uid {os.getuid()}"


def page_limit_option(help_text: str = "At most this many.") -> Callable[[F], F]:
    """`--limit` of a command that lists records."""
    return click.option(
        "--limit", type=WholeNumber(1, 10_000), default=50, metavar="NUMBER", show_default=True, help=help_text
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
