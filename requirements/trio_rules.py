"""Checks Trio's rules that ruff lacks: `python requirements/trio_rules.py FILE...`. Exits with 1 if one is broken.

The rules are flake8-async's. Its own program reads each file a second time, with LibCST, for ASYNC101 and for `# noqa`: 190 s
of CPU for our files. Here it does so only where ASYNC101 could find something, and the rest reads Python's own tree: 10 s.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from typing import TYPE_CHECKING

from flake8_async import Plugin
from flake8_async.runner import Flake8AsyncRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = "--enable=ASYNC101,ASYNC102,ASYNC103,ASYNC104,ASYNC111,ASYNC113,ASYNC120"
NOQA = re.compile(r"# noqa: *([A-Z0-9, ]+)")
MAY_YIELD = re.compile(r"contextmanager|fixture")
"""Decorators under which a `yield` inside a nursery is safe, as ASYNC101 has it."""


def problems(file: str) -> Iterator[tuple[int, str]]:
    """The lines that break a rule, each with what it breaks."""
    with tokenize.open(file) as opened:
        source = opened.read()
    tree, lines = ast.parse(source, file), source.splitlines()
    for found in Flake8AsyncRunner.run(tree, Plugin.from_source("").options):
        allowed = NOQA.search(lines[found.line - 1])
        if allowed is None or found.code not in re.split(r"[, ]+", allowed[1]):
            yield found.line, str(found)
    if yields_in_a_block(tree):
        for found in Plugin.from_filename(file).run():
            if found.code == "ASYNC101":
                yield found.line, str(found)


def yields_in_a_block(tree: ast.AST, *, inside: bool = False) -> bool:
    """Whether a function that is no context manager yields inside of a `with`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            safe = any(MAY_YIELD.search(ast.unparse(decorator)) for decorator in node.decorator_list)
            found = not safe and yields_in_a_block(node)
        elif isinstance(node, (ast.Yield, ast.YieldFrom)):
            found = inside
        else:
            found = yields_in_a_block(node, inside=inside or isinstance(node, (ast.With, ast.AsyncWith)))
        if found:
            return True
    return False


def main(files: list[str]) -> int:
    parser = argparse.ArgumentParser()
    Plugin.add_options(parser)
    Plugin.parse_options(parser.parse_args([RULES]))
    found = [f"{file}:{what}" for file in files for _, what in sorted(set(problems(file)))]
    print("\n".join(found) or f"{len(files)} files keep Trio's rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
