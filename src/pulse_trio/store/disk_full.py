"""The server has no room: says whose fault that is, and what to do. PostgreSQL mixes that with other messages."""

from __future__ import annotations

import psycopg


def disk_full(error: psycopg.Error) -> str | None:
    """The message for a user whose statement found no room on the server; None for any other error.

    A quota or a limit of the file system counts too: PostgreSQL then has another code, and the same hint.
    """
    short = isinstance(error, psycopg.errors.DiskFull) or "disk space" in (error.diag.message_hint or "")
    if not short:
        return None
    headline = str(error).strip().partition("\n")[0]
    return (
        f"the server has no room to write ({headline}). Free disk space there, or add some; nothing of this was written"
    )
