"""The settings of the page, from the environment: `PULSE_TRIO_WEB_…`. The reference page is made from them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ...ownership import distrust
from ...setting_types import parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "PULSE_TRIO_WEB_"
_SECRET = 32
_LONGEST = 30 * 86400.0
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
PAYLOADS = ("operators", "all", "none")


def _setting(default: Any, help: str, *, repr: bool = True) -> Any:
    return field(default=default, repr=repr, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """How the page is protected. Raises `ConfigurationError` for values that cannot work."""

    users: str = _setting(
        "",
        "Who may log in: NAME:HASH entries, separated by spaces or lines. `pulse-trio web --hash-password` makes an entry's "
        "hash (argon2id). Without users and without `authenticate` the page answers this machine alone.",
        repr=False,
    )
    users_file: str = _setting("", "A file with the same entries, such as a mounted secret; lines with # are comments.")
    viewers: tuple[str, ...] = _setting(
        (), "Which of the users may look and not act: names, separated by commas. All others may act."
    )
    payloads: str = _setting(
        "operators",
        "Who is shown arguments, results and what durable jobs recorded: `operators` (the users who may act), `all` or "
        "`none`.",
    )
    redact: tuple[str, ...] = _setting(
        ("*password*", "*passwd*", "*secret*", "*token*", "*api_key*", "*apikey*", "authorization", "*credential*"),
        "Names of arguments and fields whose values are shown to no one, at any depth: patterns with * and ?, separated by "
        "commas; upper and lower case are the same. Empty for none.",
    )
    secret: str = _setting(
        "",
        "Signs sessions: at least 32 characters that no one can guess. By default each process makes its own, so a restart "
        "ends all sessions; several processes behind one address need the same.",
        repr=False,
    )
    session: float = _setting(12 * 3600.0, "Seconds after which a login ends.")
    hosts: tuple[str, ...] = _setting(
        (),
        "The host names under which the page answers, beside this machine's own (localhost, 127.0.0.1, [::1]): such as "
        "`jobs.example.org` or `*.example.org`, separated by commas. By default any name where there are logins, and no "
        "other where there are none.",
    )
    trusted_proxies: tuple[str, ...] = _setting(
        (),
        "Addresses or networks of reverse proxies, separated by commas: their X-Forwarded-For and X-Forwarded-Proto are "
        "believed (logins are counted by the client's address, cookies are `Secure`). Those of other clients are "
        "ignored.",
    )

    def __post_init__(self) -> None:
        _require(self.payloads in PAYLOADS, "payloads", f"must be one of {', '.join(PAYLOADS)}, got {self.payloads!r}")
        _require(
            not self.secret or len(self.secret) >= _SECRET,
            "secret",
            f"must have at least {_SECRET} characters. Make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
        _require(60 <= self.session <= _LONGEST, "session", f"must be from 60 s to 30 days, got {self.session!r}")
        for host in self.hosts:
            _require(_HOST.fullmatch(host) is not None, "hosts", f"takes host names without a port, got {host!r}")
        _ = self.proxies

    @property
    def proxies(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        """The networks of trusted proxies."""
        try:
            return [ipaddress.ip_network(each, strict=False) for each in self.trusted_proxies]
        except ValueError as error:
            raise ConfigurationError(f"{PREFIX}TRUSTED_PROXIES takes addresses or networks: {error}.") from None

    def user_entries(self) -> tuple[str, str]:
        """The text with the users, and where it stands."""
        _require(not (self.users and self.users_file), "users", "is given, and users_file too: give one of them")
        if not self.users_file:
            return self.users, f"{PREFIX}USERS"
        path = Path(self.users_file)
        where = f"{PREFIX}USERS_FILE ({path})"
        if (reason := distrust(path)) is not None:
            raise ConfigurationError(f"{where} is not used: it {reason}, who could add users.")
        try:
            return path.read_text(encoding="utf-8"), where
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{where} cannot be read: {error}.") from None


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise ConfigurationError(f"{PREFIX}{name.upper()} {what}.")


def web_settings(environ: Mapping[str, str]) -> WebSettings:
    """The settings among the environment's variables. Raises `ConfigurationError`, also for a variable that is misspelt."""
    given: dict[str, Any] = {}
    known = {f.name: f for f in fields(WebSettings)}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in known:
            raise ConfigurationError(
                f"There is no setting {variable}; there are: {', '.join(PREFIX + each.upper() for each in known)}."
            )
        if name in ("users", "users_file") and not text.strip():
            raise ConfigurationError(
                f"{variable} is set and blank: the page would ask no one for a password. Name users in it, or unset it."
            )
        default = known[name].default
        if isinstance(default, tuple):
            given[name] = parse_list(text)
        elif isinstance(default, float):
            given[name] = _seconds(variable, text)
        else:
            given[name] = text.strip()
    return WebSettings(**given)


def _seconds(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{variable} must be a number of seconds, got {text!r}.") from None


def check_reach(host: str, settings: WebSettings) -> list[str]:
    """What to say before the page listens at `host`. Raises `ConfigurationError` if other machines could reach it and there are
    no users."""
    if _is_loopback(host):
        return []
    if not settings.user_entries()[0].strip():
        raise ConfigurationError(
            f"--host {host} lets other machines reach the page, and it has no users. Make a hash with `pulse-trio web "
            f"--hash-password`, and set {PREFIX}USERS='NAME:HASH'."
        )
    if settings.trusted_proxies:
        return []
    return [
        "passwords and sessions cross the network unencrypted, unless a proxy with HTTPS stands in front: then name it in "
        f"{PREFIX}TRUSTED_PROXIES"
    ]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
