"""Steps without keys that a job's clean-ups call because plain code has failed: told apart by what they do.

A job that fails by itself may undo things on several levels, and plain code of an inner clean-up fail in one attempt. It is
remembered then what the calls of the outer one do. In the next attempt, in which it does not fail, the first call of the inner
one has the number of such a call, and fails as that code did (half_undone.py). Where one function undoes all it was taken for
that call: it was never done, and the outer one twice. The object of a method does not count: an attribute that has changed
meanwhile would tell the same call from itself.

So it is where `FailedBefore` comes one level deeper than the code had failed. What that level undoes may have arguments that no
attempt has a second time, the text of the exception, say: so it is remembered, too, where it is called from. A step is another
one if both differ, or if what it does differs and callbacks of one `AsyncExitStack` make both.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from typing import TYPE_CHECKING

import trio

from .call_sites import call_site
from .calls import Call
from .detours import what_of
from .interrupted import plain_failure, undoes_another_level

if TYPE_CHECKING:
    from .detours import Given
    from .durable import Durable

_UNDOES, _FROM = "undoes", "undoes from"
"""The ends of the keys of the moments that say so of calls that a clean-up makes because plain code has failed, and from where
they are made."""
_SIZE = 8


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


def check_level(durable: Durable, name: str, key: str | None, given: Given) -> None:
    """A step begins, and has no number yet. Raises `FailedBefore` where that is what it is called for, and the attempt before
    has begun with the clean-up of another level than this."""
    keys, moments = durable.keys, durable.history.replay.unopened
    had = moments.within.get(f"{keys.count + 1}:{_UNDOES}")
    site = moments.within.get(f"{keys.count + 1}:{_FROM}")
    if had is None or site is None or not moments.waits.failed_at or not keys.in_main or durable.cancelling.noted:
        return
    if had == _what_of(durable, name, key, given):
        return
    call = Call("step", key or f"{keys.count + 1}:step", name)
    call.handles = sys.exception()
    now, in_stack = call_site()
    if now != site or in_stack:
        failed = undoes_another_level(durable, call)
        if failed is not None:
            raise failed


def note_what_it_undoes(durable: Durable, call: Call, key: str | None, given: Given) -> None:
    """A step begins while an exception is handled: if it undoes something because plain code has failed, it is remembered what,
    and where it is called from."""
    if not (durable.keys.in_main and durable.history.replay.over and durable.failures.clean_ups.around):
        return
    if not durable.cancelling.noted and _is_made_for_plain_failure(durable, call):
        number = durable.keys.count
        durable.history.moment(f"{number}:{_UNDOES}", float(number), _what_of(durable, call.name, key, given))
        durable.history.moment(f"{number}:{_FROM}", float(number), call_site()[0])


def _what_of(durable: Durable, name: str, key: str | None, given: Given) -> str:
    if key is not None:
        return f"key {blake2b(key.encode(), digest_size=_SIZE).hexdigest()}"
    return what_of(durable, name, given, with_owner=False)


def _is_made_for_plain_failure(durable: Durable, call: Call) -> bool:
    return plain_failure(durable, {trio.lowlevel.current_task(): call}) is not None
