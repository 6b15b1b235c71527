"""From where a request may come: proxies, host names, and the rule for a page without logins.

A page without logins is for this machine's browser. Three things tell it from others: the client's address is loopback, the
Host is one of loopback's names (a name of an attacker's that was rebound to 127.0.0.1 is not), and no proxy has forwarded the
request (one on the same machine would make everybody local).
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from .throttle import is_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope

    Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]

_HOST = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?\.?|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_FORWARDING = frozenset(
    {b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via"}
)


def header(scope: Scope, name: bytes) -> str | None:
    """A header that may occur once; None if it does not, or occurs more than once."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


def host_of(scope: Scope) -> str | None:
    """The host name of the request in lower case, without its port; None if there is none, or two, or no valid one."""
    found = _HOST.fullmatch(header(scope, b"host") or "")
    return None if found is None else found[1].lower().rstrip(".")


def is_allowed(host: str, hosts: Sequence[str], *, any_other: bool) -> bool:
    """Whether the page answers under this name. `any_other`: without a list, any name."""
    if host in _LOOPBACK or (not hosts and any_other):
        return True
    return any(
        host.endswith(each[1:].lower()) if each.startswith("*.") else host == each.lower().rstrip(".") for each in hosts
    )


def client_of(scope: Scope) -> str:
    """The client's address; empty on a Unix socket."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine, without a proxy in between that says so."""
    return is_within(client_of(scope), _LOOPBACK_NETWORKS) and not any(
        name in _FORWARDING for name, _ in scope["headers"]
    )


_LOOPBACK_NETWORKS: Networks = [ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")]


def behind(scope: Scope, proxies: Networks) -> Scope:
    """The request as the client sent it to the first trusted proxy: its address, and whether it spoke HTTPS."""
    if not proxies or not is_within(client_of(scope), proxies):
        return scope
    changed = dict(scope)
    hops = [hop.strip() for hop in ",".join(_all(scope, b"x-forwarded-for")).split(",") if hop.strip()]
    # From the right: each trusted proxy has appended the address that it saw. What a client wrote itself stands further left.
    while hops:
        address = _bare(hops.pop())
        changed["client"] = (address, 0)
        if not is_within(address, proxies):
            break
    schemes = [each.strip().lower() for each in ",".join(_all(scope, b"x-forwarded-proto")).split(",")]
    if schemes[-1] in ("http", "https"):
        changed["scheme"] = schemes[-1]
    return changed


def _all(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _bare(hop: str) -> str:
    """`1.2.3.4:5678` and `[::1]:80` without their ports."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop


def is_same_origin(scope: Scope) -> bool:
    """Whether a browser sent this request from a page of ours. A client that is no browser sends neither header."""
    if header(scope, b"sec-fetch-site") not in (None, "same-origin", "none"):
        return False
    if not any(name == b"origin" for name, _ in scope["headers"]):
        return True
    origin, host = header(scope, b"origin"), header(scope, b"host")
    if origin is None or host is None:
        return False
    scheme, _, rest = origin.lower().partition("://")
    # Without a trusted proxy nobody knows whether the browser spoke HTTPS.
    if scope["scheme"] == "https" and scheme != "https":
        return False
    return scheme in ("http", "https") and _without_default_port(rest, scheme) == _without_default_port(
        host.lower(), scheme
    )


def _without_default_port(host: str, scheme: str) -> str:
    return host.removesuffix(":443" if scheme == "https" else ":80")
