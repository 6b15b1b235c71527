"""The processes that a handler with `runs="process"` has started and left running, as its own process finds them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36
_ZOMBIES = 32
"""Processes that have ended and that nobody has waited for; with more of them this process is replaced."""
_LOOKS = 100
"""How often the threads of a process are listed, if each time one of them ends meanwhile."""


def left_running() -> frozenset[int]:
    """The processes in our own group that run and that we, or they, have started; 0 where the system does not list them. Not
    the helpers of `multiprocessing`, which end with this process.

    One system call where nothing was started. Whose end nobody has waited for is not waited for here: another thread may be
    about to. But there must not be too many of these."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):  # there is none; macOS, before Python 3.13
        return frozenset()
    try:
        helpers, pids = _helpers(), _children_of("self")
        for helper in helpers & pids:
            pids |= _children_of(helper)
    except OSError:
        return frozenset((0,))
    running, ended = set[int](), 0
    for pid in pids - helpers:
        try:
            # After the name in parentheses: state, parent, group.
            state, _, group = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:3]
        except OSError:
            continue
        ended += state == "Z"
        if state != "Z" and int(group) == os.getpgrp():
            running.add(pid)
    return frozenset(running | {0} if ended > _ZOMBIES else running)


def _children_of(pid: int | str) -> set[int]:
    """Raises `OSError` if the system does not say, or the process has ended."""
    for looks_left in reversed(range(_LOOKS)):
        tasks = os.listdir(f"/proc/{pid}/task")
        try:
            return {int(child) for task in tasks for child in _text(f"/proc/{pid}/task/{task}/children").split()}
        except (FileNotFoundError, ProcessLookupError):
            # A thread has ended since, and another one has its children. Those of a pool of processes end after its shutdown:
            # Python's `join` comes back a little before the system's thread is gone.
            if not looks_left:
                raise
    raise AssertionError("the last look returns or raises")


def _helpers() -> set[int]:
    """The processes with which `multiprocessing` tracks what it shares, and forks."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    forks = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pids: list[int | None] = [getattr(tracker, "_pid", None), getattr(forks, "_forkserver_pid", None)]
    return {pid for pid in pids if pid is not None}


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def adopt() -> None:
    """A process whose parent has ended becomes ours, so that it is known to run (on Linux)."""
    if sys.platform == "linux":
        import ctypes  # here, for a child alone: the worker has no use for it

        # Where the call is not there such a process is killed when this one ends.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
