"""Tells exceptions to every place that meets them. `python -m support.telling` tells all hostile ones.

In a process of its own, because from Python 3.13 on a question to a user's object switches a profiler on and off, which costs
ten times as much below the frames of pytest.
"""

from __future__ import annotations

import sys
import traceback
from itertools import groupby

import msgspec

from pulse_trio.describing import error_text
from pulse_trio.handlers.retries import retries_of
from pulse_trio.jobs import Claim
from pulse_trio.states import outcome_of_error
from pulse_trio.worker.jobs.kinds import wire
from support.hostile import cases, hostile


class Told(msgspec.Struct):
    """How many exceptions of a base were told, and what was wrong."""

    count: int
    wrong: list[str]


def claim() -> Claim:
    return Claim(1, 1, 20, 0, 0, "", "q", "k", "{}", None, 7)


def told(error: BaseException) -> str:
    """The text, and that every place that meets an exception survives it."""
    try:
        raise error
    except BaseException as caught:  # noqa: ASYNC103 -- what is raised is the test
        text = error_text(caught)  # noqa: ASYNC104
    text.encode()
    assert len(text.encode()) <= 16_384
    assert "\0" not in text
    policies = retries_of("k", retry={OSError: lambda _: 3}, discard_on=KeyError)
    for retries in (None, policies):
        outcome = outcome_of_error(claim(), error, retries)
        assert type(outcome.delay) is float
        assert 0 <= outcome.delay < 10**9
    # To a worker from its child process, and what becomes of it there.
    crossed = wire.decode_answer(wire.encode(wire.describe(error)))
    assert isinstance(crossed, wire.Raised)
    assert crossed.record.splitlines()[0] == text.splitlines()[0]
    crossed_as = outcome_of_error(claim(), wire.rebuild(crossed), policies, crossed.record)
    assert crossed_as.error is None or crossed_as.error.startswith(crossed.record)
    return text


def tell_hostile(base: str, name: str, behaviour: str) -> None:
    text = told(hostile(base, name, behaviour))
    assert text.startswith(("Hostile: ", "Hostile\n")), text[:200]
    if name != "__str__":
        headline = text.partition("\n\n")[0]
        assert any(said in headline for said in ("mine", "several", "300", "1")), headline


def tell_all() -> dict[str, Told]:
    """By base."""
    by_base: dict[str, Told] = {}
    for base, its in groupby(cases(), key=lambda case: case[0]):
        of_base = by_base[base] = Told(0, [])
        for _, name, behaviour in its:
            of_base.count += 1
            try:
                tell_hostile(base, name, behaviour)
            except BaseException:  # noqa: ASYNC103 -- what is raised is the test
                of_base.wrong.append(f"{name} {behaviour}: {traceback.format_exc()}")
    return by_base


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(tell_all()))
