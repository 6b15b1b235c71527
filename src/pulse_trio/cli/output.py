"""What commands print: tables for people, one JSON document for programs.

Rich is imported where a table is made: it takes a twentieth of the time that the program needs to start, and a worker makes
none.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..plain import to_json
from ..text import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console
    from rich.text import Text

UNFOLDED = 100_000
"""The width of a table that is not printed on a terminal: wide enough that nothing is cut off for a program."""


def notice(message: str) -> None:
    """A message for the user, on stderr: stdout is only for results."""
    complain(shown(message))


def complain(message: str) -> None:
    """Writes to stderr. If stderr is full or has no reader, the message is lost and the command goes on."""
    with suppress(OSError):
        click.echo(f"pulse-trio: {message}", err=True)


def print_json(value: object) -> None:
    """One JSON document, indented. ASCII only, so that a terminal can show it."""
    click.echo(to_json(value, indented=True))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """A table without lines, as `ps` prints it. Nothing where there are no rows.

    The columns in `right` are numbers; those in `whole` are not cut however narrow the terminal is; a cell that is one of
    `styles` is shown in that style.
    """
    cells = [[_cell(value, styles or {}) for value in row] for row in rows]
    if not cells:
        return
    from rich.cells import cell_len
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        width = max(cell_len(name), *(row[place].cell_len for row in cells)) if name in whole else None
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=width)
    for row in cells:
        table.add_row(*row)
    print_rich([table])


def print_rich(things: Iterable[Any]) -> None:
    """The lines that rich renders; in colour only on a terminal."""
    console = terminal()
    # Captured, because rich has its own handling of a reader that has gone.
    with console.capture() as captured:
        for thing in things:
            console.print(thing, no_wrap=True, crop=False)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one a line; empty values are left out."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        if value is not None and value != "":
            # Further lines are indented, so that a value cannot pass for another field.
            click.echo(f"{name:<{width}}  {shown(str(value)).replace(chr(10), chr(10) + ' ' * (width + 2))}")


def _cell(value: object, styles: Mapping[str, str]) -> Text:
    from rich.text import Text

    text = shown("" if value is None else str(value)).replace("\n", " ")
    return Text(text, styles.get(text, ""))


def terminal() -> Console:
    """The console for tables; unlimited in width without a terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = UNFOLDED
    return console
