"""From where in a handler a durable call is made, which tells two calls of one function apart whose arguments differ.

Pure: no I/O, no Trio."""

from __future__ import annotations

import sys
from hashlib import blake2b

from ...trio_internals import runs_tasks

_SIZE = 8
_OURS = frozenset({"pulse_trio", "trio", "outcome"})
"""Whose frames do not count."""


def call_site() -> tuple[str, bool]:
    """What stands for the functions and lines of the handler that make this call, and whether a callback of an
    `AsyncExitStack` does: its line is that of the `async with`, whichever callback it is."""
    digest, in_stack = blake2b(digest_size=_SIZE), False
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] -- documented all the same
    # Up to Trio's loop: what is behind it is how this worker was started.
    while frame is not None and not runs_tasks(module := frame.f_globals.get("__name__", "")):
        name = frame.f_code.co_qualname
        in_stack = in_stack or (module == "contextlib" and name.startswith("AsyncExitStack."))
        if module.partition(".")[0] not in _OURS:
            digest.update(f"{name} {frame.f_lineno}\n".encode("utf-8", "surrogatepass"))
        frame = frame.f_back
    return digest.hexdigest(), in_stack
