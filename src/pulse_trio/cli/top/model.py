"""What the person at the keys has chosen, and what each key does to it: without a terminal and without a database."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from ...states import FINISHED, State

if TYPE_CHECKING:
    from ...records import JobRecord
    from ...store.filtering import JobFilter
    from .reading import Frame

T = TypeVar("T")

STATES: list[str | None] = [None, *State]
PAGE = 10


@dataclass(frozen=True, slots=True)
class Act:
    """What is asked to be done: on a job, a queue or a kind. `question` is what the person confirms."""

    verb: Literal["retry", "cancel", "pause", "resume"]
    question: str
    job_id: int = 0
    queue: str | None = None
    kind: str | None = None


@dataclass(slots=True)
class Prompt:
    """A text that is being typed: the name of a queue or a kind."""

    what: Literal["queue", "kind"]
    text: str = ""


def filter_of(state: str | None, queue: str | None = None, kind: str | None = None) -> JobFilter:
    """What is left out restricts nothing."""
    return {"state": state, "queue": queue, "kind": kind}


@dataclass(slots=True)
class Model:
    """The state of the view. `act` waits for the answer to its question."""

    where: str = ""
    """The address of the database."""
    frame: Frame | None = None
    lost: str | None = None
    """Why the database does not answer."""
    said: str = ""
    """The result of the last act."""
    chosen: JobFilter = field(default_factory=lambda: filter_of(State.RUNNING))
    """The filter of the jobs; a new one for each change, because a frame keeps the one it was read for."""
    pane: Literal["queues", "jobs", "none"] = "jobs"
    at_job: int | None = None
    at_queue: str | None = None
    helping: bool = False
    prompt: Prompt | None = None
    act: Act | None = None
    asks: Literal["nothing", "to look", "to leave"] = "nothing"
    """What the last key asks for: another look at the database at once, or the end."""

    # What the cursor is on. It stays on its job or queue however the rows around it move.

    @property
    def jobs(self) -> list[JobRecord] | None:
        """The jobs of the last look if it was for this filter."""
        return self.frame.jobs if self.is_current and self.frame is not None else None

    @property
    def is_current(self) -> bool:
        """Whether the last look was for the filter that is chosen now."""
        return self.frame is not None and self.frame.chosen == self.chosen

    @property
    def job_ids(self) -> list[int]:
        """The jobs listed."""
        return [job.id for job in self.jobs or ()]

    @property
    def queue_names(self) -> list[str]:
        """The queues listed."""
        return [queue.name for queue in self.frame.glance.queues] if self.frame is not None else []

    def settle(self) -> None:
        """Puts the cursors on rows that are there."""
        if self.at_job not in self.job_ids:
            self.at_job = self.job_ids[0] if self.job_ids else None
        if self.at_queue not in self.queue_names:
            self.at_queue = self.queue_names[0] if self.queue_names else None

    def press(self, key: str) -> Act | None:
        """Takes one key. Returns the act to carry out, once it was confirmed."""
        self.asks = "nothing"
        if self.act is not None:
            act, self.act = self.act, None
            self.said = "" if key in ("y", "Y") else "nothing was done"
            return act if key in ("y", "Y") else None
        if self.prompt is not None:
            self._type(self.prompt, key)
        elif self.helping:
            self.helping = False
            self.asks = "to leave" if key == "q" else "nothing"
        else:
            self._command(key)
        return None

    def _type(self, prompt: Prompt, key: str) -> None:
        match key:
            case "enter":
                text = prompt.text.strip() or None
                state, queue, kind = self.chosen.get("state"), self.chosen.get("queue"), self.chosen.get("kind")
                self.prompt = None
                queue, kind = (text, kind) if prompt.what == "queue" else (queue, text)
                self._choose(state, queue, kind)
            case "escape":
                self.prompt = None
            case "backspace":
                prompt.text = prompt.text[:-1]
            case "clear":
                prompt.text = ""
            case _ if len(key) == 1 and key.isprintable():
                prompt.text += key
            case _:
                pass

    def _command(self, key: str) -> None:
        self.said = ""
        match key:
            case "q":
                self.asks = "to leave"
            case "?" | "h":
                self.helping = True
            case "tab" | "back tab":
                self.pane = "queues" if self.pane == "jobs" else "jobs"
            case "up" | "k":
                self._move(-1)
            case "down" | "j":
                self._move(1)
            case "page up":
                self._move(-PAGE)
            case "page down":
                self._move(PAGE)
            case "home":
                self._move(-(10**9))
            case "end":
                self._move(10**9)
            case "s" | "S":
                at = STATES.index(self.chosen.get("state")) + (1 if key == "s" else -1)
                self._choose(STATES[at % len(STATES)], self.chosen.get("queue"), self.chosen.get("kind"))
            case "u":
                self.prompt = Prompt("queue")
            case "n":
                self.prompt = Prompt("kind")
            case "x":
                self._choose(None, None, None)
            case "enter" if self.pane == "queues" and self.at_queue is not None:
                self.pane = "jobs"
                self._choose(None, self.at_queue, self.chosen.get("kind"))
            case "r" | "c" | "p" | "P":
                self._ask(key)
            case "redraw":
                self.asks = "to look"
            case _:
                pass

    def _choose(self, state: str | None, queue: str | None, kind: str | None) -> None:
        self.chosen, self.asks = filter_of(state, queue, kind), "to look"

    def _move(self, by: int) -> None:
        if self.pane == "jobs":
            self.at_job = _moved(self.job_ids, self.at_job, by)
        else:
            self.at_queue = _moved(self.queue_names, self.at_queue, by)

    def _ask(self, key: str) -> None:
        """Asks before it acts, on what the cursor is on now: what arrives meanwhile changes nothing about that."""
        if self.frame is None or self.lost is not None:
            self.said = "the database does not answer: nothing can be done now"
            return
        job = next((job for job in self.jobs or () if job.id == self.at_job), None)
        if key == "p" and (self.pane == "queues" or job is not None):
            name = self.at_queue if self.pane == "queues" or job is None else job.queue
            if name is None:
                self.said = "there is no queue to pause"
                return
            paused = any(queue.name == name and queue.paused for queue in self.frame.glance.queues)
            verb = "resume" if paused else "pause"
            self.act = Act(verb, f"{verb.capitalize()} the queue {name}?", queue=name)
        elif job is None or self.pane == "queues":
            self.said = "choose a job first (Tab moves to the jobs)" if key != "p" else "there is no queue to pause"
        elif key == "P":
            verb = "resume" if job.kind in self.frame.glance.paused_kinds else "pause"
            self.act = Act(verb, f"{verb.capitalize()} the kind {job.kind} in all queues?", kind=job.kind)
        elif key == "c" and job.state in FINISHED:
            self.said = f"job {job.id} is {job.state} already"
        elif key == "c":
            self.act = Act("cancel", f"Cancel job {job.id} ({job.kind}, {job.state})?", job_id=job.id)
        elif job.state in (State.RUNNING, State.AVAILABLE):
            self.said = f"job {job.id} is {job.state}: there is nothing to retry"
        else:
            self.act = Act("retry", f"Retry job {job.id} ({job.kind}, {job.state}) now?", job_id=job.id)


def _moved(rows: list[T], at: T | None, by: int) -> T | None:
    if not rows:
        return None
    place = rows.index(at) if at in rows else 0
    return rows[min(max(place + by, 0), len(rows) - 1)]
