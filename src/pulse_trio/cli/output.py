"""What commands print: tables for people, one JSON document for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .text import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

UNFOLDED = 100_000
"""Columns of a table that no terminal shows: nothing is cut off for a program that reads it."""


def notice(message: str) -> None:
    """Something for the person, on stderr, so that stdout stays what was asked for."""
    click.echo(f"pulse-trio: {shown(message)}", err=True)


def print_json(value: object) -> None:
    """One JSON document: records as objects, times as ISO 8601 in UTC. ASCII only, so that a terminal can show it."""
    click.echo(json.dumps(plain(value), indent=2))


def plain(value: object) -> object:
    """`value` as JSON's own types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in cast("dict[Any, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("Sequence[object]", value)]
    return value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """A table without lines, as `ps` prints it; the columns in `right` are numbers. Nothing where there are no rows."""
    rows = list(rows)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*[_cell(value) for value in row])
    console = _console()
    # Captured, because rich has an opinion of its own on what to do when the reader has gone.
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one a line; empty values are left out."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        if value is not None and value != "":
            click.echo(f"{name:<{width}}  {shown(str(value))}")


def _cell(value: object) -> Text:
    return Text(shown("" if value is None else str(value)).replace("\n", " "))


def _console() -> Console:
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = UNFOLDED
    return console
