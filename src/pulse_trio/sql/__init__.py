"""The named statements: one file each, and the one place where the schema's name is put into them.

In every file `:"schema"` stands for the schema's quoted identifier and `:'schema'` for the same name as a string literal
(psql's notation). Values never go this way: they are bound. Only `store` and `migrate` import this package.

Every file is read when this package is imported (4 ms for all of them). Read at its first use, a statement could meet a
process that has no file descriptor left, or the files of another version that was installed over this one meanwhile.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from psycopg.sql import Identifier, Literal

_PLACE = re.compile(""":"schema"|:'schema'""")


def render(text: str, schema: str) -> str:
    """Puts the schema's name into a statement or migration; hostile names come out quoted."""
    quoted = {':"schema"': Identifier(schema).as_string(), ":'schema'": Literal(schema).as_string()}
    # In one pass: a name may itself look like a place for the name.
    return _PLACE.sub(lambda place: quoted[place[0]], text)


def render_bound(text: str, schema: str) -> bytes:
    """The same for a statement that is executed with parameters: a percent sign in the name must not look like one."""
    return render(text, schema.replace("%", "%%")).encode()


def _read() -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files(__name__).iterdir():
        if file.name.endswith(".sql"):
            lines = file.read_text(encoding="utf-8").splitlines()
            # Comments are for readers; without them the server's logs and pg_stat_statements show the statement itself.
            bare = "\n".join(line for line in lines if not line.lstrip().startswith("--"))
            name = file.name.removesuffix(".sql")
            found[name] = f"/* pulse-trio {name} */ {bare}"
    return found


_STATEMENTS = _read()


@cache
def statement(name: str, schema: str) -> bytes:
    """The statement of `name`.sql for one schema, as bytes (psycopg then has nothing left to encode)."""
    return render_bound(_STATEMENTS[name], schema)
