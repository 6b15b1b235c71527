"""No room on the server: whose fault it is, and what to do. PostgreSQL says it in the middle of other things."""

from __future__ import annotations

import psycopg


def disk_full(error: psycopg.Error) -> str | None:
    """What to tell somebody whose statement the server had no room for; None if that is not what is wrong.

    A quota, or a limit of the file system, is the same to him: PostgreSQL then has another code, and the same hint.
    """
    short = isinstance(error, psycopg.errors.DiskFull) or "disk space" in (error.diag.message_hint or "")
    if not short:
        return None
    headline = str(error).strip().partition("\n")[0]
    return (
        f"the server has no room to write ({headline}). Free disk space there, or add some; nothing of this was written"
    )
