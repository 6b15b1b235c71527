"""Steps without keys that a job's clean-ups call because plain code has failed: told apart by what they do.

A job that fails by itself may undo things on several levels, and plain code of an inner clean-up fail in one attempt. It is
remembered then what the calls of the outer one do. In the next attempt, in which it does not fail, the first call of the inner
one has the number of such a call, and fails as that code did (half_undone.py). Where one function undoes all it was taken for
that call: it was never done, and the outer one twice. The object of a method does not count: an attribute that has changed
meanwhile would tell the same call from itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

from .calls import Call
from .detours import what_of
from .interrupted import plain_failure

if TYPE_CHECKING:
    from .detours import Given
    from .durable import Durable

_UNDOES = "undoes"
"""The end of the keys of the moments that say so of calls that a clean-up makes because plain code has failed."""


def told_apart(durable: Durable, name: str, given: Given) -> str:
    """The name of a step that begins, and has no key. It is one that no line has where an attempt before has undone something
    else with this number, because plain code had failed, and none has now."""
    if not durable.keys.in_main:
        return name
    number = durable.keys.count + 1
    had = durable.history.replay.unopened.within.get(f"{number}:{_UNDOES}")
    if had is None or not durable.history.replay.has_line(f"{number}:step") or durable.cancelling.noted:
        return name
    call = Call("step", "", name)
    call.handles = sys.exception()
    if _is_made_for_plain_failure(durable, call):
        return name
    what = what_of(durable, name, given, with_owner=False)
    # Another name tells itself apart.
    return f"{name} with other arguments" if had != what and had.startswith(f"step {name} ") else name


def note_what_it_undoes(durable: Durable, call: Call, given: Given) -> None:
    """A step without a key begins while an exception is handled: if it undoes something because plain code has failed, it is
    remembered what."""
    if not (durable.keys.in_main and durable.history.replay.over and durable.failures.clean_ups.around):
        return
    if not durable.cancelling.noted and _is_made_for_plain_failure(durable, call):
        number = durable.keys.count
        durable.history.moment(
            f"{number}:{_UNDOES}", float(number), what_of(durable, call.name, given, with_owner=False)
        )


def _is_made_for_plain_failure(durable: Durable, call: Call) -> bool:
    return plain_failure(durable, {trio.lowlevel.current_task(): call}) is not None
