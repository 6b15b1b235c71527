"""Who may open the page: names with argon2 hashes, and what each may do."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio.to_thread
from argon2 import PasswordHasher, Type, extract_parameters
from argon2.exceptions import Argon2Error, HashingError, InvalidHashError

from ...errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME_LIMIT = 100
SHORTEST = 8
PASSWORD_LIMIT = 1024
"""Characters. Argon2 reads a password of any length, and a login is open to strangers."""
_AT_ONCE = 2
"""Passwords that are checked at the same time: each takes 64 MiB and a core for some 50 ms."""
_IN_LINE = 32
"""Passwords that wait for that. More are refused at once."""
_NAME = re.compile(rf"[^\s:;,\x00-\x1f\x7f]{{1,{NAME_LIMIT}}}")


@dataclass(frozen=True, slots=True)
class User:
    """The person that a request comes from. Unless told otherwise a user may look, and neither act nor read payloads."""

    name: str
    """The audit trail's actor."""
    may_act: bool = False
    """Whether this user may cancel, retry, delete, pause, enqueue and so on, and look into running jobs (their stacks)."""
    may_read_payloads: bool = False
    """Whether this user is shown arguments, results and what durable jobs have recorded."""
    redact: tuple[str, ...] = ()
    """Names of fields whose values this user is not shown, as patterns, beside those of the setting."""


class TooBusyError(Exception):
    """Too many passwords wait to be checked."""


def hash_password(password: str) -> str:
    """The hash of a password for PULSE_TRIO_WEB_USERS, by argon2id with its library's parameters. Raises `UsageError` for one
    that is too short or too long."""
    if not SHORTEST <= len(password) <= PASSWORD_LIMIT:
        raise UsageError(f"A password has {SHORTEST} to {PASSWORD_LIMIT:,} characters.")
    return PasswordHasher().hash(password)


def parse_users(text: str, where: str) -> dict[str, str]:
    """Hashes by name from `NAME:HASH` entries, separated by white space; a line that begins with # is a comment.

    Raises `ConfigurationError`, which never quotes a hash."""
    found: dict[str, str] = {}
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for number, entry in enumerate(" ".join(lines).split(), 1):
        name, colon, its_hash = entry.partition(":")
        if not colon or _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"{where}: entry {number} must be NAME:HASH, a name of at most {NAME_LIMIT} characters without spaces, commas "
                "and semicolons. `pulse-trio web --hash-password` makes the hash; entries are separated by spaces or lines."
            )
        _check_hash(its_hash, name, where)
        if name in found:
            raise ConfigurationError(f"{where}: the name {name!r} occurs twice.")
        found[name] = its_hash
    return found


def _check_hash(its_hash: str, name: str, where: str) -> None:
    try:
        kind = extract_parameters(its_hash).type
    except (InvalidHashError, ValueError):
        kind = None
    if kind is not Type.ID:
        raise ConfigurationError(
            f"{where}: the hash of {name!r} is not an argon2id hash ($argon2id$v=19$...). Make one with `pulse-trio web "
            "--hash-password`; in a shell put it in single quotes, in a Compose file write each $ as $$."
        )


class Users:
    """The users of the settings.

    An unknown name takes as long as a known one: its password is checked against a hash that nothing matches, with the
    parameters of one of the real ones, the same each time for the same name."""

    def __init__(
        self, hashes: Mapping[str, str], *, viewers: frozenset[str] = frozenset(), payloads: str = "operators"
    ) -> None:
        self._hashes = dict(hashes)
        self._viewers = viewers
        self._payloads = payloads
        self._key = secrets.token_bytes(32)
        self._limiter: anyio.CapacityLimiter | None = None
        parameters = [extract_parameters(each) for each in self._hashes.values()]
        distinct = {repr(each): each for each in parameters}
        try:
            decoys = {
                name: PasswordHasher.from_parameters(each).hash(secrets.token_hex()) for name, each in distinct.items()
            }
        except HashingError as error:
            raise ConfigurationError(
                f"A hash of the page's users asks for more than this machine has ({error}): make it anew with `pulse-trio web "
                "--hash-password`."
            ) from None
        # As often as they occur among the real ones: the time says nothing about whether a name exists.
        self._decoys = [decoys[repr(each)] for each in parameters]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def check_viewers(self) -> None:
        """Raises `ConfigurationError` for a viewer who is no user: a misspelt name would leave the user free to act."""
        if self._viewers and not self._hashes:
            raise ConfigurationError(
                "PULSE_TRIO_WEB_VIEWERS names viewers, and there are no users: set PULSE_TRIO_WEB_USERS too, or remove it."
            )
        if unknown := sorted(self._viewers - set(self._hashes)):
            raise ConfigurationError(f"PULSE_TRIO_WEB_VIEWERS names {unknown[0]!r}, who is not one of the users.")

    def user(self, name: str) -> User | None:
        """The user of that name."""
        if name not in self._hashes:
            return None
        acts = name not in self._viewers
        reads = self._payloads == "all" or (self._payloads == "operators" and acts)
        return User(name, may_act=acts, may_read_payloads=reads)

    def fingerprint(self, name: str) -> str:
        """Changes when the user's password does: sessions from before end."""
        return hashlib.sha256(self._hashes.get(name, "").encode()).hexdigest()[:16]

    async def check(self, name: str, password: str) -> User | None:
        """The user, if the password is theirs. Raises `TooBusyError`."""
        limiter = self._limiter = self._limiter or anyio.CapacityLimiter(_AT_ONCE)
        if limiter.statistics().tasks_waiting >= _IN_LINE:
            raise TooBusyError
        stored = self._hashes.get(name)
        against = stored if stored is not None else self._decoy(name)
        matches = await anyio.to_thread.run_sync(_matches, against, password[:PASSWORD_LIMIT], limiter=limiter)
        return self.user(name) if matches and stored is not None and len(password) <= PASSWORD_LIMIT else None

    def _decoy(self, name: str) -> str:
        chosen = hmac.digest(self._key, name.encode(errors="surrogatepass"), "sha256")
        return self._decoys[int.from_bytes(chosen) % len(self._decoys)]


def _matches(its_hash: str, password: str) -> bool:
    try:
        return PasswordHasher().verify(its_hash, password.encode(errors="surrogatepass"))
    except Argon2Error:
        return False
