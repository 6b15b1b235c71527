"""The named statements: one file each, and the one place where the schema's name is put into them.

In every file `:"schema"` stands for the schema's quoted identifier and `:'schema'` for the same name as a string literal
(psql's notation). Values never go this way: they are bound. Only `store` and `migrate` import this package.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from psycopg.sql import Identifier, Literal


def render(text: str, schema: str) -> str:
    """Puts the schema's name into a statement or migration; hostile names come out quoted."""
    return text.replace(':"schema"', Identifier(schema).as_string()).replace(":'schema'", Literal(schema).as_string())


@cache
def statement(name: str, schema: str) -> bytes:
    """The statement of `name`.sql for one schema, as bytes (psycopg then has nothing left to encode)."""
    text = files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8")
    # Comments are for readers; without them the server's logs and pg_stat_statements show the statement itself.
    bare = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    # Every statement is executed with parameters, so a percent sign in the schema's name must not look like one.
    return render(f"/* pulse-trio {name} */ {bare}", schema.replace("%", "%%")).encode()
