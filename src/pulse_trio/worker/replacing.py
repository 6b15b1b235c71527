"""What a process says of the jobs it leaves running when it is replaced, to whoever reports them when it is gone.

Not before: while the process lives, so does a handler that does not end, and a job is settled when nothing of it runs.
"""

from __future__ import annotations

import os

import msgspec

from ..jobs import Outcome

REPLACE_ME = 75
"""The exit code of a worker process whose handlers do not end: to be started again at once (EX_TEMPFAIL)."""
STUCK_VARIABLE = "PULSE_TRIO_STUCK_JOBS"
"""Holds the outcomes, in the environment of a process that has replaced itself."""

_decoder = msgspec.json.Decoder(list[Outcome])


def encode_outcomes(outcomes: list[Outcome]) -> str:
    """As JSON."""
    return msgspec.json.encode(outcomes).decode()


def decode_outcomes(text: str) -> list[Outcome]:
    """From `encode_outcomes`."""
    return _decoder.decode(text)


def inherited_outcomes() -> list[Outcome]:
    """What the process that we replaced has left to report."""
    text = os.environ.pop(STUCK_VARIABLE, None)
    return decode_outcomes(text) if text is not None else []
