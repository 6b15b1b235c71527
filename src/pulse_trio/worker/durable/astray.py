"""What attempts have left in a history whose code did not fit it. It says nothing of code that fits: the code may be rolled
back, or mended, before the next attempt.

Such an attempt leaves moments whose value is the number of the last line before it: `0:failed` before its end, and `0:astray`
as the last that it writes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import ReplayMismatch
from ...lines import CALL_OF, BeyondLimit, Kind
from .detours import HALF_WAY
from .keys import REMEMBERED
from .stood import CANCELLATIONS
from .under_way import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ...lines import Line
    from .durable import Durable

ASTRAY = "0:astray"
"""The key of the moment that such an attempt ends with."""


def of_code_that_fits(moments: Mapping[str, float], lines: Iterable[Line]) -> Mapping[str, float]:
    """The moments without those that such attempts have given to calls with a number: other code may have other calls there."""
    own = [line for line in lines if line.kind is Kind.MOMENT]
    astray = [(float(line.value or 0), line.line) for line in own if line.key == FAILED and float(line.value or 0) > 0]
    if not astray:
        return moments
    theirs = {
        line.key
        for line in own
        if REMEMBERED.fullmatch(line.key) and any(after < line.line < told for after, told in astray)
    }
    return {key: value for key, value in moments.items() if key not in theirs}


def without_what_went_astray(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines without the cancellations with which such attempts have ended, and without what says that the clean-up after
    one did not end well. They came in calls that other code may never make: there it waited for ever, or was a mismatch. They
    come again where that stands. One stays if the attempt has done something after it."""
    if not any(line.key == ASTRAY for line in lines):
        return lines
    ordered, gone = sorted(lines, key=lambda line: line.line), set[int]()
    for index, mark in enumerate(ordered):
        if mark.kind is not Kind.MOMENT or mark.key != ASTRAY:
            continue
        after = float(mark.value or 0)
        theirs = [line for line in ordered[:index] if line.line > after]
        done = max((one.line for one in theirs if one.kind in CALL_OF and one.kind not in CANCELLATIONS), default=after)
        came = {line.line for line in theirs if line.line > done and line.kind in CANCELLATIONS}
        if came:
            gone |= came | {line.line for line in theirs if line.key == HALF_WAY and line.line > done}
    return [line for line in lines if line.line not in gone]


async def goes_astray(durable: Durable, fatal: BaseException | None) -> None:
    """The attempt ends of `fatal`, if anything, and has written all. If its code did not fit the history, that says so."""
    history, before = durable.history, durable.history.replay.resumed
    if before is None or not issubclass(type(fatal), ReplayMismatch) or history.latest <= before.last:
        return
    # The history may have no room for lines, or the lease be lost: then the error is what there is to say.
    with suppress(RuntimeError, BeyondLimit):
        history.moment(ASTRAY, float(before.last), anew=True)
        await history.written()
