"""`pulse-trio init`: writes a project that works as it is."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import click

from .faults import AppError
from .output import notice

_SUFFIX = ".txt"
"""The files are kept under another name: nothing that looks for modules or tests finds them inside of the package."""


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
def init(folder: Path) -> None:
    """Write a handler, its test and a settings file, which work as they are.

    FOLDER is created if need be; the default is the current one. Files that exist already are not touched: then
    nothing is written.
    """
    project = {
        item.name.removesuffix(_SUFFIX): item.read_text(encoding="utf-8")
        for item in sorted(files("pulse_trio.cli").joinpath("project").iterdir(), key=lambda item: item.name)
        if item.name.endswith(_SUFFIX)
    }
    if taken := [name for name in project if os.path.lexists(folder / name)]:
        raise AppError(f"Nothing was written: {folder} already has {', '.join(taken)}. Choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in project.items():
            # "x": a file that somebody else creates at this moment stays as it is.
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
            click.echo(folder / name)
    except OSError as error:
        raise AppError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    there = "" if folder.resolve() == Path.cwd() else f"  cd {folder}\n"
    notice(
        f"Now try:\n{there}"
        """  pulse-trio enqueue --app app:handlers greet '{"name": "Ada"}'\n"""
        "  pulse-trio run app:handlers --burst\n"
        "  pulse-trio jobs show 1\n"
        "  pytest"
    )
