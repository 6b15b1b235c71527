"""The named statements: one file each, and the one place where names are put into them.

| in a file | stands for |
|---|---|
| `:"schema"`, `:'schema'` | the schema's name, as a quoted identifier or as a string literal (psql's notation) |
| `:state.running` | the number that the column `state` has for it (`states.STORED`), a plain literal to the planner |
| `:part.crash_limit` | the text of `parts/crash_limit.sql`: what several statements have in common |

Workers' statements compare a list with the live table as `j.id = ANY (ARRAY[r.id])`, not as `j.id = r.id`, and sort by the
list's ids. A plan made on an analyzed table of a row or two is kept until the next ANALYZE; with `=` it may be a walk of the
whole primary key, which compares each job with each row of the list. The other form leaves one plan: a probe for each row of
the list.

Values are never put in this way: they are bound. Only `store` and `migrate` import this package.

Every file is read when this package is imported (2 ms for all of them); its names are replaced once, at its first use. If files
were read at their first use, the process could have no file descriptor left, or another version could have been installed over
this one meanwhile.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from psycopg.sql import Identifier, Literal

from ..states import STORED, State

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_PLACE = re.compile(""":"schema"|:'schema'""")


def render(text: str, schema: str) -> str:
    """Puts the schema's name into a statement or migration; hostile names are quoted."""
    quoted = {':"schema"': Identifier(schema).as_string(), ":'schema'": Literal(schema).as_string()}
    # In one pass: a name may itself look like a placeholder for the name.
    return _PLACE.sub(lambda place: quoted[place[0]], text)


def render_bound(text: str, schema: str) -> bytes:
    """Does the same for a statement that is executed with parameters: a percent sign in the name must not look like a
    placeholder."""
    return render(text, schema.replace("%", "%%")).encode()


_TOKEN = re.compile(
    r"""
      (?P<kept> \b[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | "(?:[^"]|"")*" | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$ )
    | (?P<space> (?: \s | --[^\n]* | /\*.*?\*/ )+ )
    | (?<![:\w]):(?P<what>state|part)\.(?P<name>\w+)
    """,
    re.VERBOSE | re.DOTALL,
)


def bare(text: str, parts: dict[str, str]) -> str:
    """A file's statement with its names replaced, without comments and indentation. String literals stay unchanged.

    Comments are for readers: without them the server's logs and pg_stat_statements show the statement itself. psycopg
    converts a statement of more than 4,096 characters anew for each execution.
    """

    def replaced(token: re.Match[str]) -> str:
        if token["kept"] is not None:
            return token[0]
        if token["space"] is not None:
            return "\n" if "\n" in token[0] else " "
        if token["what"] == "state":
            return str(STORED[State(token["name"])])
        return bare(parts[token["name"]], parts)

    return _TOKEN.sub(replaced, text).strip()


def _read(*folder: str) -> dict[str, str]:
    found = files(__name__).joinpath(*folder).iterdir()
    return {f.name.removesuffix(".sql"): f.read_text(encoding="utf-8") for f in found if f.name.endswith(".sql")}


_STATEMENTS, _PARTS = _read(), _read("parts")


@cache
def statement(name: str, schema: str) -> bytes:
    """The statement of `name`.sql for one schema, as bytes (psycopg then has nothing left to encode)."""
    return render_bound(f"/* pulse-trio {name} */ {bare(_STATEMENTS[name], _PARTS)}", schema)


@contextmanager
def rewritten(rewrite: Callable[[str], str]) -> Generator[None]:
    """While the block runs, every statement of this process is what `rewrite` makes of its file. For tests on virtual time."""
    kept = dict(_STATEMENTS), dict(_PARTS)
    for texts in (_STATEMENTS, _PARTS):
        texts.update({name: rewrite(text) for name, text in texts.items()})
    statement.cache_clear()
    try:
        yield
    finally:
        for texts, before in zip((_STATEMENTS, _PARTS), kept, strict=True):
            texts.update(before)
        statement.cache_clear()
