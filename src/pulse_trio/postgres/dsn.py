"""Connection strings: the parameters that we add, and the passwords that we never show."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from typing import Any
from urllib.parse import quote, unquote

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
_PASSWORD_PARAMETERS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
_IN_URL = re.compile(r"(?<=://)([^:/@\s]*):([^@\s]*)@")
_PLACES = (re.compile(r"://[^:/@\s]*:(.*)@", re.DOTALL), re.compile(r"://[^:/@\s]*:(.*?)@", re.DOTALL))
_QUOTED = re.compile(r'"([^"]*)"')
_FIRST_TO_LAST = re.compile(r'"(.*)"', re.DOTALL)
_IN_PAIRS = re.compile(rf"(\b(?:{'|'.join(_PASSWORD_PARAMETERS)})\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&']+)", re.IGNORECASE)


def parameters_of(dsn: str) -> dict[str, Any]:
    """The parameters that libpq reads in a DSN. Raises `psycopg.ProgrammingError`."""
    try:
        return conninfo_to_dict(dsn)
    except UnicodeError:
        # Its text would be shown with the password in it.
        raise e.ProgrammingError("it has bytes that are not UTF-8") from None


def with_liveliness(dsn: str, **defaults: str) -> str:
    """Add the parameters that detect a dead peer (keepalives, `tcp_user_timeout`, `connect_timeout`), unless the DSN sets
    them.

    Args:
        dsn: a connection string or URL.
        defaults: more parameters to set unless the DSN has them.

    Raises:
        psycopg.ProgrammingError: not a connection string; the message shows no password.
    """
    try:
        given = parameters_of(dsn)
    except e.ProgrammingError as ex:
        raise e.ProgrammingError(redact(str(ex), dsn)) from None
    warn_if_insecure(dsn)
    return make_conninfo("", **{**_LIVELINESS, **defaults, **given})


logger = logging.getLogger("pulse_trio")
_warned: set[str] = set()


def warn_if_insecure(dsn: str) -> None:
    """Warns of a remote server below `sslmode=verify-full`; once in a process for each server."""
    if (mode := insecure(dsn)) is None:
        return
    server = _servers(dsn)
    if server in _warned:
        return
    _warned.add(server)
    logger.warning(
        "The connection to %s has sslmode=%s: an attacker on the network can pose as the server. Add sslmode=verify-full to "
        "the DSN "
        "(and sslrootcert=system, or the file of the authority that signed its certificate).",
        redact(server, dsn),
        mode,
    )


def insecure(dsn: str) -> str | None:
    """The sslmode of a DSN with a remote server, if it is below `verify-full`; None for all others."""
    try:
        given = parameters_of(dsn)
    except e.ProgrammingError:
        return None
    mode = str(given.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer")
    return None if mode == "verify-full" or all(map(_is_here, _servers(dsn).split(","))) else mode


def _servers(dsn: str) -> str:
    given = parameters_of(dsn)
    # With an address given, the name is only compared with the certificate.
    for name, variable in (("hostaddr", "PGHOSTADDR"), ("host", "PGHOST")):
        if found := given.get(name) or os.environ.get(variable):
            return str(found)
    return ""


def _is_here(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def shown_dsn(dsn: str) -> str:
    """A connection string without secrets: unchanged where that is safe, otherwise rewritten."""
    given = _parameters(dsn)
    if not given or str(given.get("port", "")).strip("0123456789,"):
        return HIDDEN
    hidden = {name: HIDDEN for name in _PASSWORD_PARAMETERS if given.get(name)}
    anew = make_conninfo("", **given | hidden)
    if _misplaced(given):
        return redact(anew, dsn)
    # A URL may write even the word "password" as %70assword.
    text = redact(dsn, dsn)
    left = _parameters(text)
    return text if left and all(left.get(name) == HIDDEN for name in hidden) else anew


def redact(text: str, dsn: str = "") -> str:
    """Hide passwords in a text: those of URLs and `password=` pairs, and the given DSN's wherever it appears."""
    for secret in _secrets_of(dsn):
        text = text.replace(secret, HIDDEN)
    if dsn and not _parameters(dsn):
        # libpq quotes what it could not parse, which may be any part of a password, one with a quote in it too.
        quoted = _FIRST_TO_LAST if '"' in unquote(dsn) else _QUOTED
        text = quoted.sub(_unless_harmless, text)
    text = _IN_URL.sub(rf"\1:{HIDDEN}@", text)
    return _IN_PAIRS.sub(rf"\1{HIDDEN}", text)


def _unless_harmless(quoted: re.Match[str]) -> str:
    """An option's name, which shows a misspelling, and punctuation."""
    harmless = re.fullmatch(r"\W|[a-z_]+", quoted[1]) and not quoted.string[: quoted.start()].endswith("after ")
    return quoted[0] if harmless else f'"{HIDDEN}"'


def _parameters(dsn: str) -> dict[str, Any]:
    """The same; empty if it cannot be parsed."""
    try:
        return parameters_of(dsn)
    except e.ProgrammingError:
        return {}


def _secrets_of(dsn: str) -> list[str]:
    parameters = _parameters(dsn)
    if not parameters:
        # libpq quotes the part that it does not understand, which may be the password: hide the text in its place, up to the
        # first @ and up to the last.
        return [secret for place in _PLACES for secret in place.findall(dsn) if len(secret) > 2]
    found = [str(parameters.get(name) or "") for name in _PASSWORD_PARAMETERS]
    found += _misplaced(parameters)
    # A password of one or two characters would blank out half of every message and hide nothing. Also in its URL and quoted
    # forms, the longest first, because one may contain another.
    written = {form for secret in found if len(secret) > 2 for form in _forms(secret)}
    return sorted(written, key=len, reverse=True)


def _misplaced(parameters: dict[str, Any]) -> list[str]:
    """The part of a password that libpq takes for something else: in a URL an @ ends the password and begins the host name, and
    with a / behind it that of the database; a part without a following @ is taken for a port."""
    names = [str(parameters.get(name) or "") for name in ("host", "dbname")]
    port = str(parameters.get("port") or "")
    # Without a password there is nothing to hide: `dbname=a@b` is a name.
    rests = [name.rpartition("@")[0] for name in names] if parameters.get("password") else []
    return [f"{rest}@" for rest in rests if rest] + ([port] if port.strip("0123456789,") else [])


def _forms(secret: str) -> tuple[str, ...]:
    return secret, quote(secret, safe=""), quote(secret), secret.replace("\\", r"\\").replace("'", r"\'")
