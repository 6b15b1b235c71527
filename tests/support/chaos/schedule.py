"""The faults of one run, from a seed: the same seed gives the same schedule.

Every kind comes once before any comes twice. At most so many workers are struck at a time that two are left to go on, and what
strikes the server strikes it alone. Of four workers or more the last is a supervised group of processes.
"""

from __future__ import annotations

import random
from typing import NamedTuple

LEASE = 6.0
TO_WORKERS = {
    "kill": (2.5, 2.5),
    "stop short": (1.0, 2.0),
    "stop long": (LEASE + 1.5, LEASE + 3.0),
}
"""Faults of a process, and how long they last (at least, at most): kill and terminate until its successor is there."""
TO_GROUPS = {
    "kill child": (1.5, 1.5),
    "stop child": (LEASE + 1.5, LEASE + 3.0),
    "kill supervisor": (3.0, 3.0),
    "stop supervisor": (2.0, LEASE + 2.0),
}
"""Faults of one process of a supervised group."""
TO_ALL = {
    "terminate": (3.0, 3.0),
    "blocked loop": (LEASE + 1.0, LEASE + 2.5),
}
"""Faults of a worker, whether it is one process or a group."""
TO_NETWORKS = {
    "swallow": (1.0, LEASE + 2),
    "hold": (1.0, LEASE + 2),
    "latency": (3.0, 6.0),
    "replies lost": (0.3, 1.5),
    "reset": (0.0, 0.0),
}
"""Faults of the network of a worker that is reached through a proxy."""
TO_SERVER = {
    "server restart fast": (0.5, 1.5),
    "server restart immediate": (1.0, 1.0),
    "table lock": (1.0, 5.0),
    "connections full": (2.0, 4.0),
}
ANYWHERE = {
    "row lock": (LEASE, 2 * LEASE),
    "backend terminated": (0.0, 0.0),
    "listener terminated": (0.0, 0.0),
    "deaf handler": (3.0, 3.0),
}
HOSTILE = {
    "hostile producer": (2.0, 4.0),
    "planted rows": (1.0, 2.0),
    "forged notifications": (2.0, 4.0),
    "advisory locks": (3.0, LEASE + 2),
    "rolling deploy": (5.0, 8.0),
    "poison pill": (3.0, 3.0),
}
"""What other parties do: a stolen producer, an older version's rows, neighbours in the database, and those who deploy."""
KINDS = {**TO_WORKERS, **TO_GROUPS, **TO_ALL, **TO_NETWORKS, **TO_SERVER, **ANYWHERE, **HOSTILE}
CONNECTIONS = ("claims", "settles", "beats", "watchdog", "listener", "progress", "transactions")
PRODUCER = "chaos_producer"
"""A login that was granted a producer's work, and is stolen."""
STRANGER = "chaos_stranger"
"""A login that was granted nothing."""
CHILDREN = 2
"""Worker processes of a supervised group."""
DIRECTIONS = ("both", "to_server", "to_client")


class Planned(NamedTuple):
    """One fault to come: `at` and `seconds` from the run's start; `worker` is a slot's number, `how` the kind's detail."""

    at: float
    kind: str
    worker: int | None
    seconds: float
    how: str = ""


def proxied(workers: int) -> list[int]:
    """The slots whose workers reach the server through a proxy."""
    return [slot for slot in range(workers) if slot % 3 != 0]


def groups(workers: int) -> list[int]:
    """The slots that hold a supervisor and its children."""
    return [workers - 1] if workers >= 4 else []


def targets(kind: str, workers: int) -> list[int] | None:
    """The slots that a kind of fault may strike; None if it is about no worker."""
    if kind in TO_WORKERS:
        return [slot for slot in range(workers) if slot not in groups(workers)]
    if kind in TO_GROUPS:
        return groups(workers)
    if kind in TO_ALL:
        return list(range(workers))
    return proxied(workers) if kind in TO_NETWORKS else None


def plan(seed: int, seconds: float, workers: int, kinds: list[str] | None = None) -> list[Planned]:
    """The faults of a run. `kinds`: only these."""
    chance = random.Random(seed)
    planned: list[Planned] = []
    struck = [0.0] * workers  # until when
    server = 0.0
    at = 1.5
    bag: list[str] = []
    while True:
        at += chance.uniform(0.6, 1.8)
        if at > seconds - 2:
            return planned
        if not bag:
            bag = [kind for kind in kinds or KINDS if targets(kind, workers) != []]
            chance.shuffle(bag)
        for kind in bag:
            low, high = KINDS[kind]
            lasts = round(min(chance.uniform(low, high), seconds - at - 0.5), 2)
            slot = None
            if (slots := targets(kind, workers)) is not None:
                free = [s for s in slots if struck[s] <= at]
                if not free or sum(until > at for until in struck) >= max(workers - 2, 1):
                    continue
                slot = chance.choice(free)
                struck[slot] = at + lasts + 1.5
            elif kind in TO_SERVER:
                if server > at:
                    continue
                server = at + lasts + 3
            if lasts < low * 0.5:
                continue
            bag.remove(kind)
            planned.append(Planned(round(at, 2), kind, slot, lasts, detail(chance, kind)))
            break


def detail(chance: random.Random, kind: str) -> str:
    """Which way, or which connections."""
    match kind:
        case "swallow" | "hold":
            return chance.choice(DIRECTIONS)
        case "latency":
            return str(round(chance.uniform(0.2, 0.8), 2))
        case "backend terminated":
            return chance.choice(CONNECTIONS)
        case "kill child" | "stop child":
            return str(chance.randrange(CHILDREN))
        case "hostile producer" | "planted rows" | "forged notifications":
            return str(chance.randrange(10**6))
        case _:
            return ""
