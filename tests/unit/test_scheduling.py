"""The order in which xdist's workers take the tests."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import scheduling
from support.scheduling import LONGEST, LongestFirst, longest_first

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
]


@pytest.fixture(autouse=True)
def long_ones(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "longest" not in request.fixturenames:
        monkeypatch.setattr(scheduling, "_RANKS", {"tests/long.py": 0, "tests/b.py::test_long": 1})


@pytest.mark.parametrize("longest", LONGEST)
def test_each_long_test_that_is_named_is_there(longest: str) -> None:
    path, *inside = longest.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for name in inside:
        (found,) = [
            node
            for node in body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name
        ]
        body = found.body


def test_none_is_named_twice() -> None:
    assert [name for name, times in Counter(LONGEST).items() if times > 1] == []


def test_the_longest_come_first_and_the_order_within_a_file_stays() -> None:
    items: list[Any] = [SimpleNamespace(nodeid=nodeid) for nodeid in TESTS]
    longest_first(items)
    assert [item.nodeid for item in items] == TESTS[7:] + TESTS[5:7] + TESTS[2:5] + TESTS[:2]


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
    assert [node.given for node in nodes] == [[0, 2], [1, 3]]
    ended: list[int] = []
    while more := [(node, node.given[0]) for node in nodes if node.given]:
        for node, index in more:
            node.given.pop(0)
            scheduler.mark_test_complete(node, index)
            ended.append(index)
    assert sorted(ended) == [*range(len(TESTS))]
    assert all(node.shutting_down for node in nodes)
