"""The handlers of the chaos run: one of every kind, and of every way to end. A module of its own, because the children of
`runs="process"` import it.

Every handler sends an effect when it begins and every tenth of a second from then on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from datetime import datetime  # noqa: TC003 -- the handlers' annotations are read
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import trio

from pulse_trio import Discard, Handlers, Job, Snooze

if TYPE_CHECKING:
    from .recorder import Recorder

STEP = 0.1  # seconds between two effects
NARROW = 3
"""The limit of the queue `narrow`."""
TENANT = 2
"""The limit of each tenant's key."""
TENANTS = ("ada", "bob", "cleo")
CATCH_UP = {"tick_all": "all", "tick_last": "last", "tick_skip": "skip"}
"""The schedules, by kind, and what each promises of what was missed."""
EVERY = 1.0
"""Seconds between the occurrences of each schedule."""

handlers = Handlers()
handlers.queue("narrow", limit=NARROW)

WHO = os.environ.get("CHAOS_WHO", "")
"""The worker that this process is, or that it is a child of."""


class Channel:
    """The process's line to the effect sink. Blocking: a sink that is slow must not look like an effect that came late."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def tell(self, job: Job, n: int) -> None:
        said = {"job": job.id, "attempt": job.attempt, "n": n, "pid": os.getpid()}
        with self._lock:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect("effects.sock")
            self._socket.sendall(json.dumps(said).encode() + b"\n")


LINE = Channel()


def block_if_asked() -> None:
    """The fault "blocked loop": the first handler to find its worker's order stops the worker's loop for so many seconds."""
    order = Path(f"block-{WHO}")
    if not order.exists():
        return
    taken = Path(f"blocked-{WHO}-{os.getpid()}")
    try:
        order.rename(taken)
    except FileNotFoundError:
        return  # another process of this worker was quicker
    from .recorder import Recorder  # not for the children of `in_process`

    seconds = float(taken.read_text())
    Recorder(Path(f"worker-{WHO}.jsonl"), WHO).line("blocked", seconds=seconds)
    time.sleep(seconds)


async def act(job: Job, seconds: float) -> None:
    """Effects for so long."""
    end, n = trio.current_time() + seconds, 0
    while True:
        LINE.tell(job, n)
        n += 1
        block_if_asked()
        left = end - trio.current_time()
        if left <= 0:
            return
        await trio.sleep(min(STEP, left))


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def steady(job: Job, token: str, seconds: float) -> str:
    """Succeeds."""
    await act(job, seconds)
    return token


@handlers.job(max_attempts=4, backoff_base=0.05, backoff_cap=0.5)
async def failing(job: Job, token: str, seconds: float, times: int) -> str:
    """Fails in its first attempts."""
    await act(job, seconds)
    if job.attempt <= times:
        raise RuntimeError(f"failure {job.attempt} of {times}")
    return token


@handlers.job(max_attempts=4, backoff_base=0.05, backoff_cap=0.5, timeout=0.4)
async def slow(job: Job, token: str, seconds: float) -> str:
    """Takes longer than it may, the first time."""
    await act(job, seconds if job.attempt == 1 else 0.1)
    return token


@handlers.job(max_attempts=4, backoff_base=0.05, backoff_cap=0.5)
async def snoozing(job: Job, token: str, seconds: float) -> str:
    """Is put off, the first time."""
    await act(job, seconds)
    if job.attempt == 1:
        raise Snooze(0.3)
    return token


@handlers.job(max_attempts=4)
async def discarding(job: Job, token: str, seconds: float) -> str:
    """Gives up for good."""
    await act(job, seconds)
    raise Discard("not worth it")


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def family(job: Job, token: str, seconds: float) -> str:
    """Has children in its nursery, which act beside it."""
    for part in (2, 3):
        job.nursery.start_soon(act, job, seconds / part)
    await act(job, seconds)
    return token


# What is written once


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def booking(job: Job, token: str, seconds: float, how: str) -> None:
    """Writes its row in the transaction that completes it; `how` is where it lingers, or that it fails the first time."""
    await act(job, seconds)
    async with job.transaction(result=token) as tx:
        await tx.execute("INSERT INTO chaos.booking (job, attempt) VALUES (%s, %s)", [job.id, job.attempt])
        if how == "fails" and job.attempt == 1:
            raise RuntimeError("rolled back")
        if how == "lingers":
            await act(job, 0.4)
    if how == "goes on":
        await trio.sleep(0.2)


# What is limited


@handlers.job(queue="narrow", max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def narrow(job: Job, token: str, seconds: float) -> str:
    """One of few at a time, by its queue."""
    await act(job, seconds)
    return token


def by_tenant(tenant: str) -> str:
    """Whose a job of `tenant` is."""
    return tenant


@handlers.job(key=by_tenant, limit=TENANT, max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def tenant(job: Job, token: str, seconds: float, tenant: str) -> str:
    """One of few at a time, by its key."""
    await act(job, seconds)
    return token


# What comes by the clock


@handlers.cron(every=EVERY, due_as="at", catch_up="all")
@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def tick_all(job: Job, at: datetime) -> None:
    """Every occurrence."""
    LINE.tell(job, 0)


@handlers.cron(every=EVERY, due_as="at", catch_up="last")
@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def tick_last(job: Job, at: datetime) -> None:
    """Every occurrence, and the last of those missed."""
    LINE.tell(job, 0)


@handlers.cron(every=EVERY, due_as="at", catch_up="skip")
@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def tick_skip(job: Job, at: datetime) -> None:
    """Every occurrence, and none of those missed."""
    LINE.tell(job, 0)


# Trees: durable jobs with children, steps, sleeps and events

STEPS = 1000
"""The effect of step n of a tree is number `STEPS` + n."""


class Diary:
    """What durable handlers say that they were given, in the log of their worker."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def saw(self, job: Job, place: str, value: Any) -> None:
        if self._recorder is None:
            from .recorder import Recorder  # not for the children of `in_process`

            self._recorder = Recorder(Path(f"worker-{WHO}.jsonl"), WHO)
        self._recorder.line("saw", job=job.id, attempt=job.attempt, place=place, value=value)


DIARY = Diary()


async def grow(job: Job, shape: dict[str, Any]) -> str:
    """What a tree's job does. Everything that `shape` has is optional.

    `steps`, `rows`: how many of each. `body`, `ends`: seconds. `children`: their shapes. `patience`: seconds until the block's
    remembered deadline. `event`, `sleep`: seconds. `fails`: in how many attempts it raises at its end. `refund`: a step in its
    clean-up. `forgiving`: failures of children stay in their outcomes.
    """

    async def note(n: int) -> str:
        LINE.tell(job, STEPS + n)
        await trio.sleep(shape.get("pause", 0))
        return f"{job.attempt} {uuid4()}"

    async def plant(tx: Any, n: int) -> None:
        await tx.execute("INSERT INTO chaos.planted (job, attempt, n) VALUES (%s, %s, %s)", [job.id, job.attempt, n])

    try:
        for n in range(shape.get("steps", 0)):
            DIARY.saw(job, f"step {n}", await job.step(note, n, key=f"step {n}"))
        for n in range(shape.get("rows", 0)):
            await job.transaction_step(plant, n, key=f"row {n}")
        if "children" in shape:
            await _branch_out(job, shape)
        if "sleep" in shape:
            await job.sleep(shape["sleep"])
        if "event" in shape:
            for n in range(2):
                try:
                    got = await job.wait_for_event("go", type=int, timeout=shape["event"], key=f"event {n}")
                except TimeoutError:
                    got = None
                DIARY.saw(job, f"event {n}", got)
        DIARY.saw(job, "last step", await job.step(note, 99, key="step 99"))
        await act(job, shape.get("ends", 0))
    except trio.Cancelled:
        if "refund" in shape:
            with job.cleanup():
                await job.step(note, 98, key="step 98")  # noqa: ASYNC102 -- job.cleanup() is the shield
        raise
    if job.attempt <= shape.get("fails", 0):
        raise RuntimeError(f"failure {job.attempt} of {shape['fails']}")
    return "grown"


async def _branch_out(job: Job, shape: dict[str, Any]) -> None:
    kept: list[Any] = []
    forgiving = shape.get("forgiving", False)
    with job.move_on_after(shape.get("patience", 1000)) as patience:
        async with job.durable_nursery(collect=forgiving, key="block") as nursery:
            for n, child in enumerate(shape["children"]):
                handler = {"branch": branch, "leaf": leaf, "thread leaf": leaf_in_thread}[child["kind"]]
                kept.append(nursery.start_soon(handler.options(child_key=f"child {n}"), child))
            await nursery.flush()
            if shape.get("body"):
                await job.sleep(shape["body"])
    # Remembered when the next call begins, which says it.
    await job.step(_tell, job, patience.cancelled_caught, key="patience")
    if not patience.cancelled_caught:
        DIARY.saw(job, "children", [[c.id, str(c.state), c.result if c.state == "completed" else None] for c in kept])
        DIARY.saw(job, f"joined {job.attempt}", [c.id for c in kept])


async def _tell(job: Job, struck: bool) -> None:
    DIARY.saw(job, "patience", struck)


@handlers.job(durable=True, suspend_after=0.1, max_attempts=12, backoff_base=0.05, backoff_cap=0.5)
async def tree(job: Job, token: str, shape: dict[str, Any]) -> str:
    """The root of a tree."""
    return await grow(job, shape)


@handlers.job(durable=True, suspend_after=0, max_attempts=12, backoff_base=0.05, backoff_cap=0.5)
async def branch(job: Job, shape: dict[str, Any]) -> str:
    """A child that has children, and that is suspended as soon as it waits."""
    return await grow(job, shape)


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def leaf(job: Job, shape: dict[str, Any]) -> str:
    """A child that is no durable job; it is dead at its first failure, and lives again with its parent's next attempt."""
    await act(job, shape.get("ends", 0))
    if job.attempt <= shape.get("fails", 0):
        raise Discard(f"failure {job.attempt} of {shape['fails']}")
    return f"leaf of attempt {job.attempt}"


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
def leaf_in_thread(job: Job, shape: dict[str, Any]) -> str:
    """A child in a thread."""
    time.sleep(shape.get("ends", 0))
    return f"leaf of attempt {job.attempt}"


# The other kinds of handlers


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
def in_thread(job: Job, token: str, seconds: float) -> str:
    """In a thread, which must poll for its cancellation: it cannot be interrupted."""
    end, n = time.monotonic() + seconds, 0
    while job.cancel_reason is None:
        LINE.tell(job, n)
        n += 1
        left = end - time.monotonic()
        if left <= 0:
            return token
        time.sleep(min(STEP, left))
    raise RuntimeError(f"cancelled: {job.cancel_reason}")


@handlers.job(runs="asyncio", max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def on_asyncio(job: Job, token: str, seconds: float) -> str:
    """On asyncio's loop."""
    end, n = time.monotonic() + seconds, 0
    while True:
        LINE.tell(job, n)
        n += 1
        left = end - time.monotonic()
        if left <= 0:
            return token
        await asyncio.sleep(min(STEP, left))


@handlers.job(runs="process", max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
def in_process(job: Job, token: str, seconds: float) -> str:
    """In a process of its own."""
    end, n = time.monotonic() + seconds, 0
    while True:
        LINE.tell(job, n)
        n += 1
        left = end - time.monotonic()
        if left <= 0:
            return token
        time.sleep(min(STEP, left))


# What does not behave


@handlers.job(max_attempts=4, backoff_base=0.05, backoff_cap=0.5, timeout=0.4)
async def deaf(job: Job, token: str, seconds: float) -> str:
    """Swallows its cancellation and goes on, the first time. Nothing in its process can end it."""
    LINE.tell(job, 0)
    if job.attempt == 1:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103 -- what is tried
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
    return token  # noqa: ASYNC104 -- as above


@handlers.job(max_attempts=8, backoff_base=0.05, backoff_cap=0.5)
async def poison(job: Job, token: str) -> None:
    """Kills its process, whichever that is."""
    os.kill(os.getpid(), signal.SIGKILL)


KINDS = tuple(handler.kind for handler in handlers)
"""The kinds of the run's own jobs. Jobs that strangers write have other kinds."""


@handlers.job(max_attempts=1)
async def count(job: Job, n: int) -> None:
    """What strangers enqueue and plant."""
