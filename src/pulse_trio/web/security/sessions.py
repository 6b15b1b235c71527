"""Signed sessions, and the tokens of forms.

A session is a cookie that itsdangerous signs: a random id, the user's name, and a fingerprint of the user's password hash, with
the moment it was made. The server adopts no id that it did not sign, and a login makes a new one: a session that an attacker
planted before stays the attacker's own. A visitor without a login has a session too, without a name: forms need one.

A logout is remembered in this process until the session would have ended by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING, Any, NamedTuple

from itsdangerous import BadData, URLSafeTimedSerializer

if TYPE_CHECKING:
    import anyio
    from starlette.types import Scope

_SIGNER = {"digest_method": hashlib.sha256, "key_derivation": "hmac"}
_SID = 16
_ENDED = 10_000
"""Sessions that are remembered as ended: each costs the one who ends it a login."""


@dataclass(slots=True)
class Session:
    """One browser's session. `name` is None for a visitor without a login."""

    sid: str
    name: str | None = None
    fingerprint: str = ""
    expires: float = 0.0
    """Seconds of the epoch."""
    new: bool = False
    """Whether the browser does not have it yet."""


class Flash(NamedTuple):
    """A line that an action leaves for the next page; `failed` if it is a problem."""

    text: str
    failed: bool = False

    def __str__(self) -> str:
        return self.text


class Sessions:
    """Reads, makes and ends sessions."""

    def __init__(self, secret: str, seconds: float) -> None:
        key = secret or secrets.token_hex(32)
        self.seconds = seconds
        self._signed = URLSafeTimedSerializer(key, salt="pulse-trio session", signer_kwargs=_SIGNER)
        self._notes = URLSafeTimedSerializer(key, salt="pulse-trio flash", signer_kwargs=_SIGNER)
        self._plans = URLSafeTimedSerializer(key, salt="pulse-trio plan", signer_kwargs=_SIGNER)
        self._key = hmac.digest(key.encode(), b"pulse-trio form", "sha256")
        self._ended: dict[str, float] = {}
        self._sent: dict[bytes, None] = {}
        self._streams: dict[str, list[anyio.CancelScope]] = {}

    # Sessions

    def read(self, scope: Scope) -> Session | None:
        """The session of a request, if its signature is ours and it has not ended."""
        text = cookies_of(scope).get(cookie_name(scope))
        if text is None:
            return None
        try:
            held, made = self._signed.loads(text, max_age=int(self.seconds), return_timestamp=True)
            sid, name, fingerprint = held["s"], held["n"], held["f"]
        except (BadData, KeyError, TypeError):
            return None
        if sid in self._ended:
            return None
        return Session(sid, name, fingerprint, made.timestamp() + self.seconds)

    def begin(self, name: str | None = None, fingerprint: str = "") -> Session:
        """A session with a new id."""
        return Session(secrets.token_hex(_SID), name, fingerprint, time.time() + self.seconds, new=True)

    def end(self, session: Session) -> None:
        """Ends a session: its cookie is refused from now on, and its open streams are closed."""
        now = time.time()
        if len(self._ended) >= _ENDED:
            self._ended = {sid: expires for sid, expires in self._ended.items() if expires > now}
        while len(self._ended) >= _ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[session.sid] = session.expires
        for stream in self._streams.pop(session.sid, []):
            stream.cancel()

    def streaming(self, session: Session, stream: anyio.CancelScope) -> None:
        """Registers an answer that is to end when the session does."""
        self._streams.setdefault(session.sid, []).append(stream)

    def streamed(self, session: Session, stream: anyio.CancelScope) -> None:
        """The answer has ended."""
        open_ones = self._streams.get(session.sid, [])
        if stream in open_ones:
            open_ones.remove(stream)
        if not open_ones:
            self._streams.pop(session.sid, None)

    def set_cookie(self, scope: Scope, session: Session) -> str:
        """The header that gives the browser this session."""
        text = str(self._signed.dumps({"s": session.sid, "n": session.name, "f": session.fingerprint}))
        return _cookie(scope, cookie_name(scope), text, int(self.seconds))

    # Tokens

    def token(self, session: Session, user: str) -> str:
        """A token for the forms of one session and user; different each time, so that no two pages hold the same."""
        salt = secrets.token_hex(8)
        return f"{salt}.{self._tag(salt, session, user)}"

    def is_token(self, given: object, session: Session, user: str) -> bool:
        """Whether a form's token is one of this session and user."""
        if not isinstance(given, str) or not given.isascii():
            return False
        salt, _, tag = given.partition(".")
        return hmac.compare_digest(tag, self._tag(salt, session, user))

    def _tag(self, salt: str, session: Session, user: str) -> str:
        told = "\0".join((salt, session.sid, user))
        return hmac.new(self._key, told.encode(errors="surrogatepass"), "sha256").hexdigest()

    # What a browser keeps for us

    def plan(self, session: Session, user: str, what: Any) -> str:
        """Anything JSON, signed for one session and user: what a person is asked to confirm."""
        return str(self._plans.dumps([session.sid, user, what]))

    def planned(self, text: object, session: Session, user: str, seconds: int) -> Any:
        """What was planned; None if it is forged, of another session or user, or older than that."""
        try:
            sid, name, what = self._plans.loads(text, max_age=seconds)  # pyright: ignore[reportArgumentType]
        except (BadData, TypeError, ValueError, AttributeError):
            return None
        return what if (sid, name) == (session.sid, user) else None

    def set_flash(self, scope: Scope, flash: Flash) -> str:
        """The header that gives the browser a line to show on the next page."""
        return _cookie(scope, flash_name(scope), str(self._notes.dumps([flash.text[:_FLASH], flash.failed])), 60)

    def flash(self, scope: Scope) -> Flash | None:
        """The line that the last action left."""
        text = cookies_of(scope).get(flash_name(scope))
        if text is None:
            return None
        try:
            told, failed = self._notes.loads(text, max_age=60)
        except (BadData, TypeError, ValueError):
            return None
        return Flash(str(told), bool(failed))

    def is_first(self, form: str) -> bool:
        """Whether a form is sent for the first time, as far as the last thousands are remembered."""
        known = hashlib.sha256(form.encode(errors="surrogatepass")).digest()
        if known in self._sent:
            return False
        self._sent[known] = None
        if len(self._sent) > _ENDED:
            del self._sent[next(iter(self._sent))]
        return True


_FLASH = 1000
"""Characters: a browser keeps 4,096 bytes of a cookie."""


def cookies_of(scope: Scope) -> dict[str, str]:
    """The request's cookies; of several with one name the first, which browsers send for the longest path."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name == b"cookie":
            for part in value.decode("latin-1").split(";"):
                key, _, text = part.partition("=")
                found.setdefault(key.strip(), text.strip().strip('"'))
    return found


def _cookie(scope: Scope, name: str, value: str, seconds: int) -> str:
    cookie = SimpleCookie()
    cookie[name] = value
    parts = cookie[name]
    # __Host- demands the path /, and in return no neighbour on the domain can plant a cookie of that name.
    parts["path"] = "/" if is_https(scope) else f"{scope.get('root_path', '')}/"
    parts["max-age"] = str(seconds)
    parts["httponly"] = True
    parts["samesite"] = "Lax"
    if is_https(scope):
        parts["secure"] = True
    return parts.OutputString()


def forgotten(scope: Scope, name: str) -> str:
    """The header that makes the browser forget a cookie."""
    return _cookie(scope, name, "", 0)


def is_https(scope: Scope) -> bool:
    """Whether the browser speaks HTTPS, as a trusted proxy or the server says."""
    return scope["scheme"] == "https"


def cookie_name(scope: Scope) -> str:
    """The session's cookie. Several pages on one host, under different prefixes, have one each."""
    return _name(scope, "pulse-trio")


def flash_name(scope: Scope) -> str:
    """The cookie with the line for the next page."""
    return _name(scope, "pulse-trio-flash")


def _name(scope: Scope, name: str) -> str:
    if not is_https(scope):
        return name
    prefix = scope.get("root_path", "")
    return f"__Host-{name}" + (f"-{hashlib.sha256(prefix.encode()).hexdigest()[:8]}" if prefix else "")
