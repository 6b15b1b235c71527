"""Payload codecs: they encode arguments and results so that only the holders of a key can read them.

Theory. A codec works at the two ends: the client encodes a job's arguments before it sends them and decodes its result, the
worker does the reverse. The database, its backups, its logs and every reader of `pulse.jobs` see an envelope, a JSON object
like `{"$codec": "2026a", "data": "..."}`. Kind, queue, times, keys, errors and progress stay readable, because the database
and people need them.

The envelope is bound to its kind and, if the id is known before the job is written, to its job's id: a writer in the database
cannot put one job's arguments under another, a result in the place of arguments, or anything of one schema or application
into another. The id is known in advance only if it is reserved first; an enqueue with a unique key may resolve to an older
job, so its envelope is bound to the kind alone.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from copy import copy
from typing import TYPE_CHECKING, Any, cast

import msgspec

from .errors import CodecError, ConfigurationError, InvalidArguments
from .handlers import Codec, UnfitValue, check_json, encode_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MARK = '{"$codec":'
_NONCE = 12
_FORM = 2


class Envelope(msgspec.Struct, omit_defaults=True):
    """The envelope that `AeadCodec` stores. `bound` is False if the job's id was not known. `form` says what it is bound to:
    1, the first version's form, only to kind and id."""

    codec: str = msgspec.field(name="$codec")
    data: str
    bound: bool = True
    form: int = 1


class AeadCodec:
    """AES-256-GCM with keys by name (needs the extra `pulse-trio[crypto]`).

    `keys` are 32 bytes each; every one of them decodes, `current` encodes. To rotate: add the new key everywhere, then make
    it current everywhere, and drop the old one when no job or result encoded with it is left. With `accept_plain=False` the
    codec refuses arguments and results that no codec has encoded: then nothing can be enqueued from SQL, by schedules or as a
    batch's callback; the database's arguments for a hook (`on_death`) are accepted anyway. It is True by default, so that
    such jobs, and those enqueued before there was a codec, still run. `context` is any text that all programs of one
    application share, and those of another do not: each application then refuses the other's envelopes, even if they share a
    key. A random nonce of 96 bits: rotate before 2**32 jobs. Raises `ConfigurationError`.
    """

    def __init__(
        self, keys: Mapping[str, bytes], current: str, *, accept_plain: bool = True, context: str = ""
    ) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigurationError(
                "AeadCodec needs the package cryptography: pip install 'pulse-trio[crypto]'"
            ) from None
        for name, key in keys.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ConfigurationError(f"A key's name has letters, digits, _ . and - only, at most 64; got {name!r}.")
            if len(key) != 32:
                raise ConfigurationError(
                    f"The key {name!r} has {len(key)} bytes; it must have 32: secrets.token_bytes(32)."
                )
        if current not in keys:
            raise ConfigurationError(f"The current key {current!r} is not one of {', '.join(sorted(keys)) or 'none'}.")
        # Imported now, not when a payload is bad: by then the process may have no file descriptor left.
        self._invalid = InvalidTag
        self._ciphers = {name: AESGCM(key) for name, key in keys.items()}
        self._current = current
        self.accept_plain = accept_plain
        self._where = (context, "")

    def __repr__(self) -> str:
        return f"<AeadCodec current={self._current!r} keys={', '.join(sorted(self._ciphers))}>"

    def in_schema(self, schema: str) -> AeadCodec:
        """The same codec, with envelopes bound to a schema. Clients and workers use it."""
        bound = copy(self)
        bound._where = (self._where[0], schema)
        return bound

    def encode(self, plain: bytes, *, kind: str, job_id: int | None) -> str:
        """An envelope of arguments under the current key."""
        return self._seal(plain, "arguments", kind, job_id)

    def encode_result(self, plain: bytes, *, kind: str, job_id: int) -> str:
        """An envelope of a result."""
        return self._seal(plain, "result", kind, job_id)

    def decode(self, coded: str, *, kind: str, job_id: int) -> bytes:
        """Decoded arguments. Raises `CodecError`."""
        return self._open(coded, "arguments", kind, job_id)

    def decode_result(self, coded: str, *, kind: str, job_id: int) -> bytes:
        """A decoded result. Raises `CodecError`."""
        return self._open(coded, "result", kind, job_id)

    def _seal(self, plain: bytes, what: str, kind: str, job_id: int | None) -> str:
        nonce = os.urandom(_NONCE)
        context = _context(_FORM, self._current, kind, job_id, what, self._where)
        sealed = self._ciphers[self._current].encrypt(nonce, plain, context)
        data = b64encode(nonce + sealed).decode()
        return msgspec.json.encode(Envelope(self._current, data, job_id is not None, _FORM)).decode()

    def _open(self, coded: str, what: str, kind: str, job_id: int) -> bytes:
        if "$codec" not in coded:
            return self._plain(coded, kind)
        try:
            envelope = msgspec.json.decode(coded, type=Envelope, strict=True)
        except msgspec.DecodeError:
            return self._plain(coded, kind)
        cipher = self._ciphers.get(envelope.codec)
        if cipher is None:
            raise CodecError(
                f"The payload of {kind!r} job {job_id} is encoded with the key {envelope.codec[:64]!r}, and this program has "
                f"{', '.join(sorted(self._ciphers))}. Give its codec that key; the job is tried again."
            )
        if envelope.form not in (1, _FORM):
            raise CodecError(
                f"The payload of {kind!r} job {job_id} was encoded by a newer version of pulse-trio (form {envelope.form}). "
                "Upgrade this program; the job is tried again."
            )
        bound_to = job_id if envelope.bound else None
        context = _context(envelope.form, envelope.codec, kind, bound_to, what, self._where)
        try:
            sealed = b64decode(envelope.data, validate=True)
            return cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], context)
        except (self._invalid, ValueError):
            raise CodecError(
                f"The payload of {kind!r} job {job_id} was changed or belongs to another job, use, schema or application, "
                f"or the key {envelope.codec!r} "
                "is not the one it was encoded with."
            ) from None

    def _plain(self, coded: str, kind: str) -> bytes:
        if not self.accept_plain:
            raise CodecError(
                f"The payload of {kind!r} is not encoded, and this codec accepts no plain ones (accept_plain=False): "
                "enqueue or send it from a client that has the codec."
            )
        return coded.encode()


def _context(form: int, key: str, kind: str, job_id: int | None, what: str, where: tuple[str, str]) -> bytes:
    # JSON, so that different contexts never have the same encoding. The first form is read for as long as jobs have it.
    rest = [] if form == 1 else [what, *where]
    return msgspec.json.encode(["pulse-trio", form, key, kind, job_id, *rest])


def in_schema(codec: Codec | None, schema: str) -> Codec | None:
    """The codec for one schema's clients and workers; a user's own codec need not know schemas."""
    bind = getattr(codec, "in_schema", None)
    return codec if bind is None else bind(schema)


def _encode_result(codec: Codec, plain: bytes, kind: str, job_id: int) -> str:
    return getattr(codec, "encode_result", codec.encode)(plain, kind=kind, job_id=job_id)


def _decode_result(codec: Codec, coded: str, kind: str, job_id: int) -> bytes:
    return getattr(codec, "decode_result", codec.decode)(coded, kind=kind, job_id=job_id)


def encoded(codec: Codec, plain: str, kind: str, job_id: int | None) -> str:
    """A codec's encoding of a payload, checked to be a JSON object and not too large. Raises `InvalidArguments`."""
    coded = codec.encode(plain.encode(), kind=kind, job_id=job_id)
    if not _is_json(coded, dict):
        raise ConfigurationError(f"{codec!r} must make a JSON object, as text, got {coded!r:.80}.")
    return check_json(coded.encode(), f"Encoded arguments of {kind!r}")


def _is_json(coded: object, kind: type) -> bool:
    try:
        return isinstance(coded, str) and isinstance(msgspec.json.decode(coded), kind)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False


def event_context(name: str) -> str:
    """What the payload of an event is bound to, beside its job: no kind has a space, so none is taken for arguments."""
    return f"event {name}"


def decoded_event(codec: Codec | None, payload: str, name: str, job_id: int) -> bytes:
    """The plain payload of an event that a job has received. Raises `CodecError`."""
    return payload.encode() if codec is None else codec.decode(payload, kind=event_context(name), job_id=job_id)


def decoding(codec: Codec, call: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A handler's call with decoded arguments and an encoded result."""

    async def call_decoded(held: Any, args: str) -> Any:
        claim = held.claim
        called = call(held, codec.decode(args, kind=claim.kind, job_id=claim.id).decode())
        del args  # both texts may be a megabyte, and the handler may run for long
        value = await called
        return coded_result(codec, claim.kind, claim.id, value)

    return call_decoded


def coded_result(codec: Codec, kind: str, job_id: int, value: Any) -> Any:
    """The stored form of a handler's value; None, which reveals nothing, stays unchanged."""
    if value is None:
        return None
    return msgspec.Raw(_encode_result(codec, encode_result(kind, value).encode(), kind, job_id).encode())


def coded_line(codec: Codec, plain: str, kind: str, job_id: int, line: int) -> str:
    """The stored form of a value in a job's history, bound to its line. Raises `UnfitValue`: the database would refuse the
    lines of the job, at each try."""
    coded = _encode_result(codec, plain.encode(), _of_line(kind, line), job_id)
    if not _is_json(coded, object):
        raise UnfitValue(
            f"{codec!r} must make JSON, as text, of a value that a job is to remember, got {coded!r:.80}. What made the value "
            f"has been done, and no line says so. Mend the codec; pulse-trio jobs retry {job_id} goes on."
        )
    try:
        return check_json(coded.encode(), f"What {codec!r} makes of line {line} of job {job_id}")
    except InvalidArguments as error:
        raise UnfitValue(str(error)) from None


def plain_line(codec: Codec, coded: str, kind: str, job_id: int, line: int) -> str:
    """The reverse. Raises `CodecError`."""
    return _decode_result(codec, coded, _of_line(kind, line), job_id).decode()


def _of_line(kind: str, line: int) -> str:
    return f"{kind}, line {line}"


def same_result(codec: Codec | None, one: str | None, other: str | None, kind: str, job_id: int) -> bool:
    """Whether two stored results of a job are one value. A codec writes the same value differently each time."""
    if one == other or codec is None or one is None or other is None:
        return one == other
    try:
        return _decode_result(codec, one, kind, job_id) == _decode_result(codec, other, kind, job_id)
    except Exception:
        # A codec may only encode. The answer affects only an event, and a failing codec must not keep the job from ending.
        return True


def decoded_value(codec: Codec, value: Any, kind: str, job_id: int, *, result: bool = False) -> Any:
    """Arguments or a result of a job, as a client shows them. None means no result. Raises `CodecError`."""
    if value is None:
        return None
    is_object, accepts = isinstance(value, dict), getattr(codec, "accept_plain", None)
    if accepts is False or (is_object and "$codec" in cast("dict[str, Any]", value)):
        return _decoded(codec, value, kind, job_id, result=result)
    if accepts or not is_object:
        return value
    # A user's own codec, which says nothing of plain values: its envelopes need not have that key.
    try:
        return _decoded(codec, value, kind, job_id, result=result)
    except Exception:  # it may raise anything for what it has not made, which is shown as it is
        return value


def _decoded(codec: Codec, value: Any, kind: str, job_id: int, *, result: bool) -> Any:
    decode = _decode_result if result else _decode_arguments
    return msgspec.json.decode(decode(codec, msgspec.json.encode(value).decode(), kind, job_id))


def _decode_arguments(codec: Codec, coded: str, kind: str, job_id: int) -> bytes:
    return codec.decode(coded, kind=kind, job_id=job_id)
