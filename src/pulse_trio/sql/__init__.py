"""The named statements: one file each, and the one place where the schema's name is put into them.

In every file `:"schema"` stands for the schema's quoted identifier and `:'schema'` for the same name as a string literal
(psql's notation). Values never go this way: they are bound. Only `store` and `migrate` import this package.
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


@cache
def statement(name: str, schema: str) -> bytes:
    """The statement of `name`.sql for one schema, as bytes (psycopg then has nothing left to encode)."""
    text = files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8")
    # Comments are for readers; without them the server's logs and pg_stat_statements show the statement itself.
    bare = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    return render_bound(f"/* pulse-trio {name} */ {bare}", schema)
