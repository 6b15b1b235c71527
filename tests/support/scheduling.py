"""Which tests the workers of xdist take first: those that take longest, so that none of them begins when all else is done.

Left to itself, xdist gives each worker its part of the tests in the order of their files. The last tenth of a run then took as
long as its first half: long tests began when most workers had nothing left. Here what takes longest is handed out first: a long
test alone, or what else is in a file, to one worker, which makes the databases that its tests share once.

How long each takes is in durations.json, which `make test ARGS=--note-durations` writes. What is not in it is thought short.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pytest

DURATIONS = Path(__file__).with_name("durations.json")
LONG = 4.0
"""Seconds from which on a test is handed out alone."""
UNKNOWN = 0.2
"""Seconds that a test is thought to take of which nothing is known."""

Durations = dict[str, float]


def read() -> Durations:
    return json.loads(DURATIONS.read_text(encoding="utf-8"))


_SECONDS: Mapping[str, float] = read()


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def unit_of(nodeid: str) -> str:
    """What is handed out together with a test: nothing with a long one, else the rest of its file."""
    return nodeid if function_of(nodeid) in _SECONDS else file_of(nodeid)


def longest_first(items: list[pytest.Item]) -> None:
    """Puts first what takes longest: a long test, or a file. The order within a file stays."""
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        unit = unit_of(item.nodeid)
        seconds[unit] = _SECONDS.get(function_of(unit), seconds[unit] + UNKNOWN)
    items.sort(key=lambda item: (-seconds[unit_of(item.nodeid)], file_of(item.nodeid), unit_of(item.nodeid)))


class LongestFirst(LoadScopeScheduling):
    """Hands out what `longest_first` has put in order, to each worker that is almost done with what it has."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by size: what is handed out alone would come last

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


class Notes:
    """A plugin of the controller's that writes `DURATIONS` at the end of a run."""

    def __init__(self) -> None:
        self._calls: dict[str, float] = {}
        self._around: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._calls[report.nodeid] = report.duration
        else:
            self._around[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        noted = durations(self._calls, self._around)
        DURATIONS.write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")


def durations(calls: Mapping[str, float], around: Mapping[str, float]) -> Durations:
    """Seconds of each long test, and of the rest of each file, the longest first. `around` are those of the fixtures: a test
    whose file has an expensive one is not handed out alone, because each worker would set that up for itself."""
    dear: dict[str, float] = defaultdict(float)
    for nodeid, seconds in around.items():
        dear[file_of(nodeid)] = max(dear[file_of(nodeid)], seconds)
    longest: dict[str, float] = defaultdict(float)
    for nodeid, seconds in calls.items():
        if seconds >= LONG and dear[file_of(nodeid)] < seconds / 2:
            longest[function_of(nodeid)] = max(longest[function_of(nodeid)], seconds)
    rest: dict[str, float] = defaultdict(float)
    for nodeid, seconds in _both(calls, around):
        if function_of(nodeid) not in longest:
            rest[file_of(nodeid)] += seconds
    known = {**longest, **rest}
    return {name: round(known[name], 1) for name in sorted(known, key=lambda name: (-known[name], name))}


def _both(calls: Mapping[str, float], around: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    yield from calls.items()
    yield from around.items()
