"""A progress bar on stderr. The measuring program itself draws it four times a second, so that no thread takes its time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.progress import Progress

INTERVAL = 0.25


class Bar:
    """One bar for all runs."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._run = ""

    def run(self, number: int, runs: int) -> Bar:
        """Starts the next run."""
        self._run = f"run {number} of {runs}: " if runs > 1 else ""
        return self

    def begin(self, what: str, total: int) -> None:
        """Starts a run of this many steps."""
        self._progress.reset(self._task, description=f"{self._run}{what}", total=total, start=True)
        self._progress.refresh()

    async def follow(self, done: Callable[[], int]) -> None:
        """Shows the value of `done` until cancelled."""
        while True:
            self._progress.update(self._task, completed=done())
            self._progress.refresh()
            await trio.sleep(INTERVAL)


@contextmanager
def open_bar() -> Generator[Bar]:
    """A bar for as long as the block runs; nothing where there is no terminal."""
    # Imported here: see output.py.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Bar(progress)
