"""How far a measurement is, on stderr. Drawn four times a second by the measuring program itself: no thread takes its time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

INTERVAL = 0.25


class Bar:
    """One bar for all runs."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._run = ""

    def run(self, number: int, runs: int) -> Bar:
        """The next run begins."""
        self._run = f"run {number} of {runs}: " if runs > 1 else ""
        return self

    def begin(self, what: str, total: int) -> None:
        """Something with so many steps begins."""
        self._progress.reset(self._task, description=f"{self._run}{what}", total=total, start=True)
        self._progress.refresh()

    async def follow(self, done: Callable[[], int]) -> None:
        """Shows what `done` says, until cancelled."""
        while True:
            self._progress.update(self._task, completed=done())
            self._progress.refresh()
            await trio.sleep(INTERVAL)


@contextmanager
def open_bar() -> Generator[Bar]:
    """A bar for as long as the block runs; nothing where there is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Bar(progress)
