"""The order in which xdist's workers take the tests."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import scheduling
from support.scheduling import LongestFirst, durations, longest_first

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/a.py::test_1",
    "tests/a.py::test_2",
    "tests/b.py::test_1",
    "tests/b.py::test_2",
    "tests/b.py::test_3",
    "tests/b.py::test_long[x]",
    "tests/b.py::test_long[y]",
    "tests/long.py::test_1",
    "tests/long.py::TestAll::test_2",
    "tests/new.py::test_1",
]
KNOWN = {"tests/long.py": 20.0, "tests/b.py::test_long": 10.0, "tests/b.py": 2.0, "tests/a.py": 1.0}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_SECONDS", KNOWN)


def test_each_long_test_and_each_file_that_is_noted_is_there() -> None:
    for noted in scheduling.read():
        path, *inside = noted.split("::")
        body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        for name in inside:
            (found,) = [
                node
                for node in body
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name
            ]
            body = found.body


@pytest.mark.usefixtures("known")
def test_the_longest_come_first_and_the_order_within_a_file_stays() -> None:
    items: list[Any] = [SimpleNamespace(nodeid=nodeid) for nodeid in TESTS]
    longest_first(items)
    assert [item.nodeid for item in items] == TESTS[7:9] + TESTS[5:7] + TESTS[2:5] + TESTS[:2] + TESTS[9:]


def test_long_tests_are_noted_alone_and_the_rest_of_their_file_together() -> None:
    calls = {"t.py::test_a[1]": 5.0, "t.py::test_a[2]": 7.0, "t.py::test_b": 1.0, "t.py::test_c": 0.5}
    assert durations(calls, dict.fromkeys(calls, 0.25)) == {"t.py::test_a": 7.0, "t.py": 2.0}


def test_a_file_with_an_expensive_fixture_is_handed_out_whole_and_early() -> None:
    calls = {"t.py::test_a": 5.0, "t.py::test_b": 1.0, "u.py::test_c": 4.5}
    assert durations(calls, {"t.py::test_a": 4.0}) == {"t.py": 10.0, "u.py::test_c": 4.5}


class Node:
    """Stands for one of xdist's workers, and keeps what it is told to run."""

    shutting_down = False
    gateway = SimpleNamespace(id="gw")

    def __init__(self) -> None:
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.usefixtures("known")
def test_long_tests_are_handed_out_one_by_one_and_files_whole_until_none_is_left() -> None:
    config: Any = SimpleNamespace(getvalue=lambda _: ["2*popen"], option=SimpleNamespace(loadscopereorder=True))
    items: list[Any] = [SimpleNamespace(nodeid=nodeid) for nodeid in TESTS]
    longest_first(items)
    collection = [item.nodeid for item in items]
    nodes: list[Any] = [Node(), Node()]
    scheduler = LongestFirst(config)
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, collection)
    scheduler.schedule()
    # Each has one to run and the next, which pytest wants to know.
    assert [node.given for node in nodes] == [[0, 1, 3], [2, 4, 5, 6]]
    ended: list[int] = []
    while more := [(node, node.given[0]) for node in nodes if node.given]:
        for node, index in more:
            node.given.pop(0)
            scheduler.mark_test_complete(node, index)
            ended.append(index)
    assert sorted(ended) == [*range(len(TESTS))]
    assert all(node.shutting_down for node in nodes)
