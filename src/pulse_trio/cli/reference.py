"""The reference pages of the command line and of the settings, written from the commands and settings themselves.

python -m pulse_trio.cli.reference docs/reference            writes them
python -m pulse_trio.cli.reference --check docs/reference    exits 1 if they are not current
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..settings import WorkerSettings
from .application import pulse_trio
from .options import default_of, flag_of, variable_of

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 120
MADE = "<!-- Made by `python -m pulse_trio.cli.reference docs/reference`; a test says when it has to be made again. -->"

CLI_INTRODUCTION = """\
`pulse-trio` works on one database: the one given with `--dsn`, else `PULSE_TRIO_DSN`, else `DATABASE_URL`, else `dsn` in
the [settings file](settings.md), else an embedded PostgreSQL in the project's folder, which is started when it is needed
and shared between commands. Which one it is, is said on stderr. The embedded one has its schema by itself; any other gets
it only from `pulse-trio migrate`.

`python -m pulse_trio` is the same command. `pulse-trio --install-completion` has Tab complete commands and options (bash,
zsh and fish): it writes one file into your own folder, prints its path, and says what the shell still needs.

What was asked for goes to stdout, everything else to stderr. `--json` prints one JSON document with times in ISO 8601
(UTC); `run --json` logs one object a line. An error is one line on stderr that begins with `pulse-trio:`. A command
that cannot write to stdout (closed, a full disk) says so and ends with 1; a stderr that cannot be written to stops no command.
A worker does not wait for the program that reads its stderr: 1 MB of log is kept for it, lines beyond that are left out and
counted.

| exit code | meaning |
|---|---|
| 0 | done; `run`: drained |
| 1 | an error, the database's fault: it cannot be reached, or its schema is not the one needed |
| 2 | wrong usage, yours: a setting, a module, arguments, a job that is not there |
| 3 | `run`: the grace passed, or it was told to stop at once, and jobs were released |
| 130 | Ctrl-C |
| 141 | the reader of the output has gone (`pulse-trio jobs list \\| head -1`) |
"""

SETTINGS_INTRODUCTION = """\
A worker's settings come from the command line, else from the environment, else from the project's file, else they have
their default. The file is `pulse-trio.toml`, or `[tool.pulse-trio]` in `pyproject.toml`, in the current folder or the
nearest above that has either:

```toml
dsn = "postgresql://app@db.example:5432/app"
queues = ["mail", "default"]
concurrency = 200
connect-timeout = 60
```

A file in a folder above is passed over, with a warning, when it belongs to another user (neither you nor root) or others may
write it: whoever may write there could choose your database. One in the current folder that belongs to another user is an
error.

`Worker(handlers, dsn, concurrency=200, ...)` takes the same names. All times are in seconds.
"""


def cli_page() -> str:
    """`docs/reference/cli.md`."""
    return "\n".join([MADE, "", "# The command line", "", CLI_INTRODUCTION, *_sections(_context(pulse_trio, None))])


def _context(command: click.Command, parent: click.Context | None) -> click.Context:
    return click.Context(command, info_name=command.name if parent else "pulse-trio", parent=parent)


def _sections(ctx: click.Context) -> Iterator[str]:
    command = ctx.command
    if isinstance(command, click.Group):
        if ctx.parent is not None:
            yield from (f"## {ctx.command_path}", "", _prose(command), "")
        for name in command.list_commands(ctx):
            yield from _sections(_context(command.commands[name], ctx))
        return
    yield from (f"## {ctx.command_path}", "", f"```\n{_usage(ctx)}\n```", "", _prose(command), "", *_options(ctx), "")


def _usage(ctx: click.Context) -> str:
    return " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])


def _prose(command: click.Command) -> str:
    paragraphs = (command.help or "").split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(p.split()), WIDTH, break_on_hyphens=False) for p in paragraphs)


def _options(ctx: click.Context) -> Iterator[str]:
    yield from ("| option | meaning |", "|---|---|")
    for option in ctx.command.params:
        if isinstance(option, click.Option):
            flag = f"{option.opts[0]} {option.metavar}" if option.metavar else option.opts[0]
            yield f"| `{_cell(flag)}` | {_cell(_help(option))} |"


def _help(option: click.Option) -> str:
    # Not click's own record: that differs from version to version.
    return f"{option.help} [default: {option.default}]" if option.show_default else option.help or ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def settings_page() -> str:
    """`docs/reference/settings.md`."""
    rows = [
        f"| `{field.name}` | {default_of(field)} | {_cell(field.metadata['help'])} | `{flag_of(field.name)}` "
        f"| `{variable_of(field.name)}` |"
        for field in fields(WorkerSettings)
    ]
    head = ["| setting | default | meaning | option | variable |", "|---|---|---|---|---|"]
    return "\n".join([MADE, "", "# Settings", "", SETTINGS_INTRODUCTION, *head, *rows, ""])


PAGES = {"cli.md": cli_page, "settings.md": settings_page}


def outdated(folder: Path) -> list[str]:
    """The pages in `folder` that are not what they would be if they were made now."""
    return [name for name, page in PAGES.items() if _read(folder / name) != page()]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a page is not current.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def reference(check: bool, folder: Path) -> None:
    """Write the reference pages into FOLDER."""
    old = outdated(folder)
    for name in old:
        click.echo(f"{name} is not current" if check else f"{name} written")
        if not check:
            (folder / name).write_text(PAGES[name](), encoding="utf-8")
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    reference()
