"""Connection strings: what we add to them, and what we never show of them."""

from __future__ import annotations

import re

from psycopg import errors as e
from psycopg.conninfo import conninfo_to_dict, make_conninfo

HIDDEN = "***"

# libpq ignores these on Unix sockets and on platforms that lack them.
_LIVELINESS = {
    "keepalives": "1",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    # Milliseconds; covers what keepalives do not, data sent and never acknowledged.
    "tcp_user_timeout": "15000",
    # Seconds for each address; libpq's own default is to wait for the kernel, about two minutes.
    "connect_timeout": "10",
}
_PASSWORD_PARAMETERS = ("password", "sslpassword", "oauth_client_secret")
_IN_URL = re.compile(r"(?<=://)([^:/@\s]*):([^@\s]*)@")
_IN_PAIRS = re.compile(r"(\b(?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&']+)", re.IGNORECASE)


def with_liveliness(dsn: str, **defaults: str) -> str:
    """Add what makes a dead peer noticed (keepalives, `tcp_user_timeout`, `connect_timeout`), unless the DSN says
    otherwise.

    Args:
        dsn: a connection string or URL.
        defaults: more parameters to set unless the DSN has them.

    Raises:
        psycopg.ProgrammingError: not a connection string; the message shows no password.
    """
    try:
        given = conninfo_to_dict(dsn)
    except e.ProgrammingError as ex:
        raise e.ProgrammingError(redact(str(ex))) from None
    return make_conninfo("", **{**_LIVELINESS, **defaults, **given})


def redact(text: str, dsn: str = "") -> str:
    """Hide passwords in a text: those of URLs and `password=` pairs, and the given DSN's wherever it appears."""
    for secret in _secrets_of(dsn):
        text = text.replace(secret, HIDDEN)
    text = _IN_URL.sub(rf"\1:{HIDDEN}@", text)
    return _IN_PAIRS.sub(rf"\1{HIDDEN}", text)


def _secrets_of(dsn: str) -> list[str]:
    try:
        parameters = conninfo_to_dict(dsn)
    except e.ProgrammingError:
        return []
    found = (str(parameters.get(name) or "") for name in _PASSWORD_PARAMETERS)
    # A password of one or two characters would blank out half of every message and hide nothing.
    return [secret for secret in found if len(secret) > 2]
