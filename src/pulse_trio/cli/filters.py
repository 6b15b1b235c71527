"""The options that select jobs: the same for listing, retrying and deleting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..states import State
from ..store.filtering import FILTERS
from ..text import parse_duration, parse_moment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from ..store.filtering import JobFilter

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

STATES = [str(state) for state in State]


def _read_by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An option's type from a function that raises `ValueError`."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.UsageError(f"{error}.", click.get_current_context(silent=True)) from None

    return read


def _rate(text: str) -> float:
    number, _, unit = text.strip().partition("/")
    per = {"": 1, "s": 1, "min": 60, "h": 3600}
    try:
        rate = float(number) / per[unit.strip()]
    except (ValueError, KeyError):
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"a rate is a number of jobs a second, minute or hour, as in 100/s or 30/min, not {text!r}")
    return rate


MOMENT = _read_by(parse_moment)
RATE = _read_by(_rate)


def _retention(text: str) -> timedelta | str:
    return text if text == "default" else parse_duration(text)


parsed_retention = _read_by(_retention)

_OPTIONS = (
    click.option(
        "--state", type=click.Choice(STATES), metavar="STATE", help=f"Only jobs in this state: {', '.join(STATES)}."
    ),
    click.option("--queue", metavar="NAME", help="Only jobs of this queue."),
    click.option("--kind", metavar="NAME", help="Only jobs of this kind."),
    click.option("--worker", metavar="WORKER", help="Only jobs this worker ran last: its id or host:pid."),
    click.option(
        "--since",
        type=MOMENT,
        metavar="TIME",
        help="Only jobs that finished since then or, if unfinished, were enqueued since then: 2h (ago), 2026-11-21, "
        "2026-11-21T09:30.",
    ),
    click.option("--until", type=MOMENT, metavar="TIME", help="Only jobs from before then."),
    click.option("--error", metavar="TEXT", help="Only jobs whose last error contains this text."),
    click.option("--unique-key", metavar="KEY", help="Only jobs with this unique key."),
    click.option("--key", metavar="KEY", help="Only jobs with this key, which limits and turns use."),
    click.option("--tag", metavar="TAG", help="Only jobs with this tag."),
    click.option(
        "--owes-clean-up",
        is_flag=True,
        default=None,
        help="Only durable jobs that were cancelled, or should have been, and whose job.cleanup() did not end well.",
    ),
)


def filter_options(command: F) -> F:
    """A decorator: the options that make a `JobFilter`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def filter_of(given: Mapping[str, Any]) -> JobFilter:
    """The filter from a command's arguments, without those that were not given."""
    chosen: Any = {name: given[name] for name in FILTERS if given.get(name) is not None}
    return chosen


def described(chosen: Mapping[str, Any]) -> str:
    """`state dead, kind send_welcome`."""
    return ", ".join(
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
        for name, value in chosen.items()
    )
