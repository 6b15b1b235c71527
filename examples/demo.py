"""A job for every file of a directory: `make demo`, or `python examples/demo.py [DIR]`.

Each job reads its file in a thread and returns its checksum, its lines and words, and how small it can be made. A few
other jobs fail once and are retried, and one dies. The summary at the end is read back from the database.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import stat
import sys
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import trio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pulse_trio import Discard, Handlers, Job, PulseTrioError, SchemaError, Worker, open_client
from pulse_trio.embedded import open_embedded
from pulse_trio.migrate import migrate_sync
from pulse_trio.states import FINISHED

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from pulse_trio import Client, JobRequest

SKIPPED = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    ".pulse-trio",
    "__pycache__",
    "node_modules",
    ".tox",
    "build",
    "dist",
}
CACHE_MARKS = ("CACHEDIR.TAG", "pyvenv.cfg")  # folders that say of themselves that they hold nothing of yours
TOO_BIG = 256 * 2**20
CHUNK = 2**20
FLAKY = 5

console = Console(highlight=False, markup=False)
handlers = Handlers()


# The jobs


@handlers.job
def measure(path: str, raw: bytes | None = None) -> dict[str, Any]:
    """A plain function, so it runs in a thread: reading files blocks. `raw` is the name where it is no valid text."""
    try:
        with open(raw if raw is not None else path, "rb") as file:
            return measure_file(file)
    except (PermissionError, FileNotFoundError) as error:
        # No retry will help: the job is dead at once, and says why.
        raise Discard(f"{error.strerror}") from None


def measure_file(file: Any) -> dict[str, Any]:
    """What is worth knowing of a file, whatever its size."""
    digest, packer = hashlib.sha256(), zlib.compressobj()
    size = lines = words = packed = 0
    in_word = False  # a word may go on in the next chunk
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        lines += chunk.count(b"\n")
        packed += len(packer.compress(chunk))
        words += len(chunk.split()) - (in_word and not chunk[:1].isspace())
        in_word = not chunk[-1:].isspace()
    packed += len(packer.flush())
    return {"bytes": size, "lines": lines, "words": words, "compressed": packed, "sha256": digest.hexdigest()}


@handlers.job(backoff_base=0.5)
async def announce(job: Job, recipient: str) -> str:
    """Fails the first time, as remote things do."""
    await trio.sleep(0.05)
    if job.attempt == 1:
        raise ConnectionError("the other side hung up (on purpose)")
    return f"{recipient} knows"


@handlers.job(max_attempts=3, backoff_base=0.1)
async def doomed() -> None:
    """Fails every time: after its last attempt the job is dead, and keeps its last error."""
    raise RuntimeError("this job fails every time (on purpose)")


# What there is to do


@dataclass
class Tree:
    """A directory's files, and what was left out of them."""

    root: Path
    skipped: dict[str, int] = field(default_factory=dict)

    def requests(self, queue: str) -> Iterator[JobRequest]:
        """A job for each regular file."""
        handler = measure.options(queue=queue)
        for path in self.files():
            name = os.fsencode(path)
            try:
                yield handler.request(name.decode())
            except UnicodeDecodeError:
                # A name is bytes, and JSON holds text: the bytes go beside a readable version of it.
                yield handler.request(name.decode(errors="replace"), raw=name)

    def files(self) -> Iterator[str]:
        """Every regular file: no links, no devices, no caches, nothing too big for a demonstration."""
        for folder, folders, names in os.walk(self.root, onerror=lambda _: self.skip("folders that cannot be read")):
            folders[:] = sorted(f for f in folders if not is_cache(folder, f))
            for name in sorted(names):
                path = os.path.join(folder, name)
                if self.wanted(path):
                    yield path

    def wanted(self, path: str) -> bool:
        try:
            found = os.lstat(path)
        except OSError:
            return False  # gone already
        if not stat.S_ISREG(found.st_mode):
            self.skip("links and other things that are not files")
        elif found.st_size > TOO_BIG:
            self.skip(f"files over {size_of(TOO_BIG)}")
        else:
            return True
        return False

    def skip(self, why: str) -> None:
        self.skipped[why] = self.skipped.get(why, 0) + 1


def is_cache(folder: str, name: str) -> bool:
    if name in SKIPPED or name.endswith((".egg-info", "_cache")):
        return True
    return any(os.path.exists(os.path.join(folder, name, mark)) for mark in CACHE_MARKS)


# Running it


async def demonstrate(root: Path) -> None:
    """Enqueues, works, and shows what came of it."""
    async with open_embedded() as server:
        await trio.to_thread.run_sync(migrate_sync, server.dsn)
        console.print(f"Embedded PostgreSQL {server.version} in {server.folder}", style="dim")
        # A queue of its own for each run, so that the summary is this run's.
        queue = time.strftime("demo-%Y%m%d-%H%M%S")
        tree = Tree(root)
        async with open_client(server.dsn) as client:
            count = await enqueue(client, tree, queue)
            console.print(
                f"{count:,} jobs on the queue {queue}: one for each file of {printable(str(root))}, and a few more"
            )
            await work(client, server.dsn, queue, count)
        await trio.to_thread.run_sync(show_summary, server.dsn, queue, tree)


async def enqueue(client: Client, tree: Tree, queue: str) -> int:
    """All of them or none: one transaction."""
    requests = [*tree.requests(queue), doomed.options(queue=queue).request()]
    requests += [announce.options(queue=queue).request(f"recipient {n}") for n in range(1, FLAKY + 1)]
    return len(await client.enqueue_many(requests))


async def work(client: Client, dsn: str, queue: str, count: int) -> None:
    """A worker in this very program, until the last job has ended."""
    async with trio.open_nursery() as nursery:
        worker: Worker = await nursery.start(Worker(handlers, dsn, queues=(queue,), concurrency=16).run)
        with open_progress(count) as progress:
            while (done := await finished(client, queue)) < count:
                progress.update(progress.task_ids[0], completed=done, running=worker.running)
                await trio.sleep(0.1)
            progress.update(progress.task_ids[0], completed=done, running=0)
        worker.stop()


async def finished(client: Client, queue: str) -> int:
    states = await client.count_by_state(queue=queue)
    return sum(count for state, count in states.items() if state in FINISHED)


@contextmanager
def open_progress(total: int) -> Generator[Progress]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[running]} running"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        progress.add_task("jobs", total=total, running=0)
        yield progress


# What came of it, from the database

BY_STATE = """
    SELECT kind, state, count(*), sum(attempt), sum(greatest(attempt - 1, 0)) FROM pulse.jobs WHERE queue = %s
    GROUP BY 1, 2 ORDER BY 3 DESC"""
BIGGEST = """
    SELECT args->>'path', (result->>'bytes')::bigint, (result->>'lines')::bigint, (result->>'words')::bigint,
           left(result->>'sha256', 12)
    FROM pulse.jobs WHERE queue = %s AND kind = 'measure' AND state = 'completed' ORDER BY 2 DESC, 1 LIMIT 5"""
SMALLEST = """
    SELECT args->>'path', (result->>'bytes')::bigint, (result->>'compressed')::bigint
    FROM pulse.jobs WHERE queue = %s AND kind = 'measure' AND state = 'completed' AND (result->>'bytes')::bigint >= 1024
    ORDER BY (result->>'compressed')::float8 / (result->>'bytes')::float8, 1 LIMIT 5"""
DEAD = """
    SELECT id, kind, args->>'path', attempt, split_part(error, E'\\n', 1)
    FROM pulse.jobs WHERE queue = %s AND state = 'dead' ORDER BY id DESC LIMIT 5"""
TOTALS = """
    SELECT count(*), extract(epoch FROM max(finished_at) - min(started_at))::float8,
           coalesce(sum((result->>'bytes')::bigint), 0)::float8, coalesce(sum((result->>'lines')::bigint), 0)::bigint
    FROM pulse.jobs WHERE queue = %s AND kind = 'measure' AND state = 'completed'"""


def show_summary(dsn: str, queue: str, tree: Tree) -> None:
    """Everything here comes from the view `pulse.jobs`."""
    with psycopg.connect(dsn, autocommit=True) as connection:

        def ask(query: str) -> list[Any]:
            return connection.execute(query.encode(), [queue]).fetchall()

        show_table("Jobs", ("kind", "state", "jobs", "attempts", "retries"), ask(BY_STATE), right=(2, 3, 4))
        show_biggest(ask(BIGGEST), tree.root)
        show_smallest(ask(SMALLEST), tree.root)
        dead = ask(DEAD)
        show_dead(dead, tree.root)
        show_totals(ask(TOTALS)[0], tree)
    show_next(dead[0][0])


def show_biggest(rows: Sequence[Any], root: Path) -> None:
    rows = [
        (short(path, root), size_of(size), f"{lines:,}", f"{words:,}", sha) for path, size, lines, words, sha in rows
    ]
    show_table("Biggest files", ("file", "size", "lines", "words", "sha256"), rows, right=(1, 2, 3))


def show_smallest(rows: Sequence[Any], root: Path) -> None:
    rows = [(short(path, root), size_of(size), size_of(packed), f"{packed / size:.1%}") for path, size, packed in rows]
    show_table("Most compressible", ("file", "size", "compressed", "of it"), rows, right=(1, 2, 3))


def show_dead(rows: Sequence[Any], root: Path) -> None:
    rows = [(id, kind, short(path, root) if path else "", attempt, error) for id, kind, path, attempt, error in rows]
    show_table("Dead", ("id", "kind", "file", "attempts", "last error"), rows, right=(0, 3))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Any], *, right: Sequence[int]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number in right else "left", header_style="dim", overflow="fold")
    for row in rows:
        table.add_row(*[Text(printable(str(value))) for value in row])
    console.print()
    console.print(table)


def show_totals(totals: tuple[int, float | None, float, int], tree: Tree) -> None:
    count, seconds, size, lines = totals
    seconds = max(seconds or 0.0, 0.001)
    console.print()
    console.print(
        f"{count:,} files, {lines:,} lines, {size_of(size)} in {seconds:.2f} s: "
        f"{count / seconds:,.0f} jobs/s, {size_of(size / seconds)}/s"
    )
    for why, number in tree.skipped.items():
        console.print(f"Left out: {number:,} {why}", style="dim")


def show_next(dead: int) -> None:
    command = Path(sys.executable).with_name("pulse-trio")
    shown = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
    text = f"""
The jobs are still there. To look at them, in this folder:
  {shown} jobs list --state dead
  {shown} jobs show {dead}
Then handlers of your own: examples/app.py is a start.
  cd examples
  {command} run app:handlers
  {command} enqueue send_welcome '{{"user_id": 42}}'    (in another terminal)
To look at them in a browser, in this folder (Ctrl-C ends it); then open http://127.0.0.1:8080/
  {shown} web"""
    console.print(text, soft_wrap=True)
    for variable in ("PULSE_TRIO_DSN", "DATABASE_URL"):
        if os.environ.get(variable):
            console.print(f"(Unset {variable} first: this was done in the embedded PostgreSQL.)")


def short(path: str, root: Path) -> str:
    """The name below the directory that was asked for."""
    return path.removeprefix(f"{root}/")


def printable(text: str) -> str:
    """A file's name may hold anything, and a terminal would obey it."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def size_of(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", type=Path)
    root: Path = parser.parse_args().directory
    if not root.is_dir():
        print(f"demo: {printable(str(root))} is not a directory", file=sys.stderr)
        return 2
    code = 0
    try:
        trio.run(demonstrate, root)
    except* KeyboardInterrupt:
        code = 130
    except* PulseTrioError as errors:
        print(f"demo: {errors.exceptions[0]}", file=sys.stderr)
        if errors.subgroup(SchemaError):
            print("demo: remove .pulse-trio to start again without its jobs", file=sys.stderr)
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
