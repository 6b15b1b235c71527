"""One frame as lines of text, for any size of a terminal. Every name from the database is displayed, never sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...plain import to_json
from ...store.life import moment_of
from ...text import ago, duration, headline, local_time, shown
from ..timeline import STYLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text

    from ...store.glance import QueueGlance
    from .model import Model
    from .reading import Frame

JOB_COLUMNS = ("job", "state", "queue", "kind", "attempt", "when", "progress", "error or arguments")
WHOLE = ("job", "state", "when", "due", "oldest", "running", "scheduled")
"""Columns that are not cut."""
LEAST = (40, 10)
"""Columns and lines below which there is no room for the view."""
HELP = """\
Tab          queues or jobs          q        leave
arrows, j k  move                    ?        this help
s, S         the next state, the one before
u            only a queue            n        only a kind (its name)
Enter        on a queue: its jobs    x        no filter
r            retry the job           c        cancel the job
p            pause or resume the queue (of the job, or under the cursor)
P            pause or resume the job's kind, in all queues

Every act asks first: y does it, any other key does not.
Counts are bounded: 1,000+ is at least so many. Rates are rows that
PostgreSQL counted. More of a job: pulse-trio jobs show ID, pulse-trio stack ID.

Any key goes back."""


def draw(model: Model, console: Console, size: tuple[int, int]) -> list[str]:
    """The lines of the whole screen, at most as many as it has."""
    from rich.text import Text

    columns, lines = size
    console.width, console.height = columns, lines
    if columns < LEAST[0] or lines < LEAST[1]:
        small = f"too small: {LEAST[0]}x{LEAST[1]} are needed"
        return _rendered(console, [Text(small)], lines)
    if model.helping:
        return _rendered(
            console, [Text("pulse-trio top: keys", "bold"), Text(""), *map(Text, HELP.splitlines())], lines
        )
    parts: list[RenderableType] = [_title(model, columns)]
    frame = model.frame
    if frame is None:
        parts.append(Text("reading ..."))
    else:
        parts += [_summary(frame), _trouble(frame)]
        rows = frame.glance.queues
        room = lines - 6
        for_queues = min(max(len(rows), 1), max(3, room // 3))
        parts.append(_queues(model, rows, for_queues, columns))
        parts.append(_jobs(model, frame, room - for_queues, columns))
    body = _rendered(console, parts, lines - 1)
    body += [""] * (lines - 1 - len(body))
    return [*body, *_rendered(console, [_foot(model)], 1)]


def _rendered(console: Console, parts: Sequence[RenderableType], lines: int) -> list[str]:
    with console.capture() as captured:
        for part in parts:
            console.print(part, no_wrap=True, overflow="ellipsis", crop=True)
    return [line.rstrip(" ") for line in captured.get().splitlines()][:lines]


def _title(model: Model, columns: int) -> Text:
    from rich.text import Text

    now = local_time(model.frame.at)[11:19] if model.frame is not None else ""
    if model.lost is None:
        return Text.assemble(("pulse-trio top", "bold"), f"  {now}  ", (shown(model.where), "dim"))
    since = f" (shown: {now})" if now else ""
    line = Text.assemble(("NO DATABASE", "bold reverse red"), f"{since}  {headline(model.lost)}")
    line.truncate(columns, overflow="ellipsis")
    return line


def _summary(frame: Frame) -> Text:
    from rich.text import Text

    live = [worker for worker in frame.glance.workers if worker.is_live]
    slots, running = sum(w.concurrency for w in live), sum(w.running for w in live)
    line = f"workers {len(live)}   slots {running:,}/{slots:,}"
    if frame.rates is not None:
        each = frame.rates
        line += f"   a second: {each.enqueued:,.1f} enqueued, {each.finished:,.1f} finished, {each.missed:,.1f} put off"
    return Text(line)


def _trouble(frame: Frame) -> Text:
    from rich.text import Text

    if not frame.troubles:
        read = "schedules and the last attempts" if frame.lately.found is not None else "schedules"
        return Text(f"nothing is wrong with workers, queues, {read}; pulse-trio doctor looks at more", "green")
    return Text(shown("; ".join(frame.troubles)).replace("\n", " "), "bold red")


def _queues(model: Model, rows: list[QueueGlance], room: int, columns: int) -> RenderableType:
    names = ["queue", "state", "due", "oldest", "running", "scheduled"]
    cells = [
        (
            row.name,
            "paused" if row.paused else "",
            _count(row.available, row),
            duration(round(row.oldest)) if row.available else "",
            _count(row.running, row),
            _count(row.scheduled, row),
        )
        for row in rows
    ]
    place = model.queue_names.index(model.at_queue) if model.at_queue in model.queue_names else 0
    chosen = place if model.pane == "queues" else None
    return _table(names, cells, (2, 3, 4, 5), place, chosen, _Size(room, columns), "no queue has jobs")


def _count(number: int, row: QueueGlance) -> str:
    return f"{number:,}+" if row.at_least and number else f"{number:,}"


def _jobs(model: Model, frame: Frame, room: int, columns: int) -> RenderableType:
    cells = [
        {
            "job": str(job.id),
            "state": job.state,
            "queue": job.queue,
            "kind": job.kind,
            "attempt": f"{job.attempt}/{job.max_attempts}",
            "when": ago(moment_of(job), frame.at),
            "progress": "" if job.progress is None else f"{job.progress:.0%}",
            "error or arguments": headline(job.error) or to_json(job.args, ascii_only=False)[:200],
        }
        for job in model.jobs or ()
    ]
    left_out = {"queue", "attempt", "progress"} if columns < 70 else {"progress"} if columns < 110 else set[str]()
    names = [name for name in JOB_COLUMNS if name not in left_out]
    rows = [[cell[name] for name in names] for cell in cells]
    empty = "no job like that" if frame.jobs is not None else "the list took too long: filter by a state, or by less"
    if not model.is_current:
        empty = "reading ..."
    place = model.job_ids.index(model.at_job) if model.at_job in model.job_ids else 0
    return _table(names, rows, (0,), place, place if model.pane == "jobs" else None, _Size(room, columns), empty)


class _Size(NamedTuple):
    """What a table may take: rows below its header, and the columns of a line."""

    rows: int
    columns: int


def _table(
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[int],
    place: int,
    chosen: int | None,
    size: _Size,
    empty: str,
) -> RenderableType:
    """A header and its rows, with the one at `place` among them. The last column gives way to the others: it is cut where the
    line ends."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    room, left = size.rows, size.columns
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), expand=False)
    for number, name in enumerate(names):
        last = number == len(names) - 1
        widest = max([cell_len(name), *(cell_len(shown(row[number])) for row in cells)])
        left -= 0 if last else 2 + (widest if name in WHOLE else min(widest, 24))
        table.add_column(
            name,
            justify="right" if number in right else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=max(left, 8) if last else None if name in WHOLE else 24,
            min_width=widest if name in WHOLE else None,
        )
    first = max(0, min(place - room // 2, len(cells) - room))
    for number, row in enumerate(cells[first : first + room], first):
        texts = [Text(shown(cell).replace("\n", " "), STYLES.get(cell, "")) for cell in row]
        table.add_row(*texts, style="reverse" if number == chosen else "")
    if not cells:
        table.add_row(Text(""), Text(""), Text(empty, "dim"))
    return table


def _foot(model: Model) -> Text:
    from rich.text import Text

    if model.act is not None:
        return Text(f"{shown(model.act.question)} y/n", "bold reverse")
    if model.prompt is not None:
        return Text(f"{model.prompt.what} (empty: all): {shown(model.prompt.text)}_", "bold")
    if model.said:
        return Text(shown(model.said).replace("\n", " "), "bold")
    filters = [f"{name} {value}" for name, value in model.chosen.items() if value is not None]
    keys = "   s state  u queue  n kind  x all   r c p P act   ? help  q quit"
    return Text.assemble((shown(", ".join(filters)) or "all jobs", "bold"), keys)
