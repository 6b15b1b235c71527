"""One handler of each kind, which does what its argument says and tells the test's ear (a Unix datagram socket) about it."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import trio

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze

handlers = Handlers()


class Stopped(Exception):
    """What a handler in a thread raises when it has asked, and was told that it is cancelled."""


def tell(ear: str, word: str, job: Job) -> None:
    about = {"word": word, "reason": job.cancel_reason, "pid": os.getpid(), "job": job.id, "attempt": job.attempt}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.sendto(json.dumps(about).encode(), ear)


def at_once(what: str) -> str:
    match what:
        case "succeed":
            return "the value"
        case "snooze":
            raise Snooze(300)
        case "retry after":
            raise RetryAfter(300)
        case "discard":
            raise Discard("never")
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "interrupts":
            raise BaseExceptionGroup("several", [KeyboardInterrupt(), SystemExit(2)])
        case "local":

            class Throttled(OSError): ...

            raise Throttled("too many")
        case "group":
            raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
        case _:
            raise ValueError("the reason")


@handlers.job(name="trio")
async def on_trio(job: Job, what: str, ear: str) -> str:
    if what != "wait":
        return at_once(what)
    tell(ear, "started", job)
    try:
        await trio.sleep_forever()
    finally:
        tell(ear, "ended", job)
    raise AssertionError


@handlers.job(name="asyncio", runs="asyncio")
async def on_asyncio(job: Job, what: str, ear: str) -> str:
    await asyncio.sleep(0)
    if what != "wait":
        return at_once(what)
    tell(ear, "started", job)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.01)  # noqa: ASYNC102 -- what is tried
        tell(ear, "ended", job)
    raise AssertionError


@handlers.job(name="thread")
def in_thread(job: Job, what: str, ear: str) -> str:
    if what != "wait":
        return at_once(what)
    tell(ear, "started", job)
    while job.cancel_reason is None:
        time.sleep(0.01)
    with job.cleanup():
        tell(ear, "ended", job)
    return "what there was"


def is_a_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def left(what: str) -> str:
    if what.endswith("raise"):
        raise ValueError("the reason")
    if what.endswith("die"):
        os._exit(7)
    return "left"


@handlers.job(name="process", runs="process")
def in_process(job: Job, what: str, ear: str) -> Any:
    if what == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    elif what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "say":
        trio.run(job.progress, 0.5, "half of it")
        return "said"
    elif what == "leave":
        os._exit(7)
    elif what.startswith("fork"):
        if os.fork() == 0:
            if what == "fork, return":
                return "what the fork returned"
            raise ValueError("the fork's") if what == "fork, raise" else SystemExit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == (what == "fork, raise")
        return "what the handler returned"
    elif what == "babble":
        # On the line to the worker: more than any answer has, and no end of it.
        for line in filter(is_a_socket, map(int, os.listdir("/proc/self/fd"))):
            with suppress(OSError):
                os.write(line, b"x" * 60_000_000)
    elif what.startswith("leave a process"):
        sleeping = subprocess.Popen(["sleep", "600"]).pid
        Path(ear).write_text(str(sleeping))
        return left(what)
    elif what.startswith("leave an orphan"):
        Path(ear).write_text(subprocess.check_output(["sh", "-c", "sleep 600 > /dev/null & echo $!"], text=True))
        return left(what)
    elif what == "share":
        with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
            return [pool.submit(abs, -1).result(), os.getpid()]
    elif what == "read":
        return Path(ear).read_text()
    elif what == "who":
        return [job.id, job.attempt, job.kind, job.queue, job.max_attempts, os.getpid()]
    elif not what.startswith("wait"):
        return at_once(what)
    try:
        # Inside: the signal may come as soon as the test has heard it.
        tell(ear, "started", job)
        while True:
            sum(range(1000))
    finally:
        if what == "wait, then say":
            trio.run(job.progress, 1.0)
        tell(ear, "ended", job)


def plain(n: int) -> int:
    return n + 1


handlers.job(name="plain", runs="process")(plain)
