"""The shape of the code: files that can be read in one go, classes with few attributes, parts that are handed over whole.

A file that is longer says why in its first lines, so that its reader knows.
The lists of exceptions may only shrink. An entry that is not needed any more fails its test.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src" / "pulse_trio"
LINES, ARGUMENTS, ATTRIBUTES = 400, 6, 12

WHY_LONG = f"Longer than {LINES} lines, because "
"""What the docstring of a longer file begins its reason with, within its first `REASON_WITHIN` lines."""
REASON_WITHIN = 10

MANY_ARGUMENTS = {
    "worker/worker.py Worker": "public: its keywords are a promise",
    "store/worker.py WorkerStore": "public: its keywords are a promise",
}
MANY_ATTRIBUTES = {
    "worker/jobs/running_job.py RunningJob": "the row of the job table: one for each job, with slots",
}
CALLED_BACK = {
    "worker/worker.py Worker": "the program's hooks, and a supervisor's",
    "worker/jobs/running_job.py RunningJob": "`call`: the handler",
    "worker/diagnosis/lag.py LagMonitor": "`clock`: the system's",
    "worker/claiming/cursors.py ClaimCursors": "`make`: a class of the store's",
}
"""Constructors of worker/ that take something to call, with what that is: never another part of the worker's. How the kinds of
handlers are called (worker/jobs/kinds) is about nothing else than calls, and is left out."""


@cache
def parsed() -> list[tuple[str, str, ast.Module]]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    return [(path.relative_to(SOURCE).as_posix(), text, ast.parse(text)) for path, text in texts.items()]


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (f"{name} {node.name}", node)
        for name, _, module in parsed()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    ]


def constructors() -> Iterator[tuple[str, ast.arguments]]:
    for name, node in classes():
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                yield name, member.args


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class sets on `self`, and a dataclass's fields."""
    of_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    fields = {m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)}
    stored = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    return stored | fields if of_dataclass else stored


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class only holds values: a dataclass whose values never change, and which never waits."""
    frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
    return frozen and not any(isinstance(member, ast.AsyncFunctionDef) for member in node.body)


def test_a_file_has_at_most_400_lines_or_says_first_why_not() -> None:
    long = {name for name, text, _ in parsed() if len(text.splitlines()) > LINES}
    assert long == {name for name, text, _ in parsed() if WHY_LONG in "\n".join(text.splitlines()[:REASON_WITHIN])}


def test_a_constructor_of_the_worker_or_the_store_takes_at_most_6_arguments() -> None:
    many = {
        name
        for name, its in constructors()
        if len(its.posonlyargs) + len(its.args) + len(its.kwonlyargs) - 1 > ARGUMENTS
        and name.startswith(("worker/", "store/"))
    }
    assert many == set(MANY_ARGUMENTS)


def test_a_class_keeps_at_most_12_attributes_unless_it_is_a_record() -> None:
    many = {name for name, node in classes() if len(attributes(node)) > ATTRIBUTES and not is_record(node)}
    assert many == set(MANY_ATTRIBUTES)


def test_no_part_of_the_worker_is_given_something_to_call_of_another_part() -> None:
    called = set[str]()
    for name, its in constructors():
        given = [*its.posonlyargs, *its.args, *its.kwonlyargs]
        if (
            name.startswith("worker/")
            and not name.startswith("worker/jobs/kinds/")
            and any(
                "Callable" in ast.unparse(argument.annotation) for argument in given if argument.annotation is not None
            )
        ):
            called.add(name)
    assert called == set(CALLED_BACK)


def test_where_the_parts_are_made_nothing_is_wired_by_a_function() -> None:
    """Neither a lambda nor a function made on the spot nor a bound method is handed to a part."""
    for name in ("worker/building.py", "worker/worker.py"):
        module = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
        made = [node for node in ast.walk(module) if isinstance(node, ast.Call) and _makes_a_part(node)]
        assert made or name.endswith("worker.py")
        assert not [node for node in ast.walk(module) if isinstance(node, ast.Lambda)]
        methods = {
            member.name for _, node in classes() for member in node.body if isinstance(member, ast.FunctionDef)
        } - {"session"}
        for call in made:
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                if isinstance(argument, ast.Attribute) and not (_is_a_setting(argument) or _is_a_store(argument)):
                    assert argument.attr not in methods, f"{ast.unparse(call)}: {ast.unparse(argument)}"


def _makes_a_part(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Name)
        and call.func.id[0].isupper()
        and call.func.id not in ("WorkerStore", "Observer")
    )


def _is_a_setting(argument: ast.Attribute) -> bool:
    return ast.unparse(argument.value) in ("settings", "plan", "hooks", "self.settings")


def _is_a_store(argument: ast.Attribute) -> bool:
    """A part of the worker's store, which is an object and no operation of it."""
    (whole,) = [node for name, node in classes() if name == "store/worker.py WorkerStore"]
    return ast.unparse(argument.value) == "store" and argument.attr in attributes(whole)
