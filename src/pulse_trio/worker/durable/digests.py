"""What stands for the kind and the arguments of each child of a block. A later attempt that starts another child under the same
key is told so."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from ...handlers.models import fields_of

if TYPE_CHECKING:
    from ...handlers import Handler

_SIZE = 16


class Digests:
    """Of one block of a job. They are keyed by the job's id, so that equal arguments of two jobs do not look alike."""

    __slots__ = ("_begun", "_by_key", "_salt")

    def __init__(self, job_id: int) -> None:
        self._salt = str(job_id).encode()
        self._by_key: dict[str, bytes] = {}
        self._begun: dict[str, Any] = {}
        """The digest of each kind, to which the arguments are still to be added: to begin one anew takes longer than that."""

    def add(self, key: str, handler: Handler[..., Any], args: str) -> bytes:
        """The digest of the child `key`; `args` is JSON by name."""
        kind = handler.kind
        if args == "{}":
            found = self._digest(kind, b"{}")
        else:
            # Decoded first: the order of the names, and that of a set, may be another in the next attempt.
            given = handler.signature.by_name(args)
            names = msgspec.json.decode(args)
            found = self._digest(kind, in_one_order({name: given.get(name) for name in names}))
        self._by_key[key] = found
        return found

    def fits(self, key: str, digest: bytes) -> bool:
        """Whether the child `key` was added with this one."""
        return self._by_key[key] == digest

    def _digest(self, kind: str, plain: bytes) -> bytes:
        begun = self._begun.get(kind)
        if begun is None:
            begun = self._begun[kind] = blake2b(kind.encode() + b"\0", key=self._salt, digest_size=_SIZE)
        digest = begun.copy()
        digest.update(plain)
        return digest.digest()


def in_one_order(arguments: dict[str, Any]) -> bytes:
    """As JSON that is the same in each attempt. Raises what `msgspec` raises for what JSON cannot carry."""
    try:
        return msgspec.json.encode(arguments, enc_hook=fields_of, order="sorted")
    except TypeError:
        # It sorts no dictionary whose keys are numbers, say, until they are texts, as they are in JSON.
        texts = msgspec.to_builtins(arguments, enc_hook=fields_of, order="sorted", str_keys=True)
        return msgspec.json.encode(texts, order="sorted")
