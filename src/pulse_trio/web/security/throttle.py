"""Limits attempts: at most so many by one key within a window, in bounded memory.

An attempt counts when it begins, so that a thousand at the same moment are a thousand; one that succeeds is given back. Counts
are this process's own: a restart forgets them, and each of several processes has its own.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Throttle:
    """At most `most` attempts for each key within `seconds`. The `keys` that tried last are remembered."""

    def __init__(
        self, most: int, seconds: float, *, keys: int = 10_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._keys = keys
        self._clock = clock
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    def wait(self, key: str) -> float:
        """Seconds until the key may try again; 0 if it may now."""
        tries = self._recent(key)
        return 0.0 if len(tries) < self._most else tries[0] + self._seconds - self._clock()

    def count(self, key: str) -> None:
        """An attempt begins."""
        tries = self._recent(key)
        tries.append(self._clock())
        self._tries[key] = tries
        self._tries.move_to_end(key)
        while len(self._tries) > self._keys:
            self._tries.popitem(last=False)

    def give_back(self, key: str) -> None:
        """The attempt that was counted last was none."""
        if tries := self._tries.get(key):
            tries.pop()

    def _recent(self, key: str) -> deque[float]:
        tries = self._tries.get(key, deque())
        since = self._clock() - self._seconds
        while tries and tries[0] <= since:
            tries.popleft()
        return tries


class LoginThrottle:
    """For logins: by name, which bounds a guesser with many addresses, and by address, which bounds one with many names."""

    def __init__(
        self,
        *,
        by_name: int = 10,
        by_address: int = 30,
        seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = Throttle(by_name, seconds, clock=clock)
        self._addresses = Throttle(by_address, seconds, clock=clock)

    def begin(self, name: str, address: str) -> float:
        """Seconds to wait before the next attempt; 0: the attempt is counted, and may be made."""
        where = network_of(address)
        seconds = max(self._names.wait(name), self._addresses.wait(where))
        if seconds <= 0:
            self._names.count(name)
            self._addresses.count(where)
        return max(seconds, 0.0)

    def succeeded(self, name: str, address: str) -> None:
        """The password was right. Earlier failures still count: a guesser may have an account of their own."""
        self._names.give_back(name)
        self._addresses.give_back(network_of(address))


def network_of(address: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 address: one customer has as many addresses as that."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:100]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def is_within(address: str, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    """Whether an address belongs to one of the networks."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)
