"""What a process that is replaced says of its still running jobs, for the process that reports them when it is gone.

They are not reported before: while the process lives, so does a handler that does not end, and a job is reported when no part
of it runs.

Each job is one line with what its report needs. Arguments may be a megabyte, while the line to the supervisor has a buffer of
some 200 kB and an environment variable holds 128 KiB; a successor in place therefore gets a file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ...jobs import Outcome
from ...states import cut
from .crash_dump import nameless_file

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACE_ME = 75
"""The exit code of a worker process whose handlers do not end: to be started again at once (EX_TEMPFAIL)."""
STUCK_VARIABLE = "PULSE_TRIO_STUCK_JOBS"
"""Holds the number of the inherited descriptor of the outcomes, in the environment of a process that has replaced itself."""
QUIET_VARIABLE = "PULSE_TRIO_CLAIM_NOTHING"
"""In the environment of a process whose predecessor was told to claim nothing more."""
ADDRESS_VARIABLE = "PULSE_TRIO_REPORT_TO"
"""In the environment of a process that has replaced itself: where it reports the outcomes before it does anything else."""
SIGNALS_VARIABLE = "PULSE_TRIO_SIGNALS"
"""Holds the number of the inherited descriptor of the signals that the process caught as it replaced itself: a byte each."""
_ERROR_LIMIT = 16_384
"""Bytes of an error: the stack of a handler may be four times as long."""

_encode = msgspec.json.encode
_decoder = msgspec.json.Decoder(Outcome)


class Address(msgspec.Struct, frozen=True):
    """Where the outcomes are reported, and whether the process that was replaced had been told to stop. `embedded`: its server
    is this folder's own, which ends with the process that uses it."""

    dsn: str
    schema: str
    ends: bool = False
    embedded: bool = False


def encode_outcome(outcome: Outcome) -> str:
    """As JSON, in one line of at most some 100 kB: the claim without its arguments and options."""
    claim = replace(outcome.claim, args="{}", options=None)
    error = None if outcome.error is None else cut(outcome.error, _ERROR_LIMIT)
    return _encode(replace(outcome, claim=claim, error=error)).decode()


def decode_outcome(text: str | bytes) -> Outcome:
    """From `encode_outcome`."""
    return _decoder.decode(text)


def leave_to_successor(stuck: Sequence[Outcome], address: Address, *, quiet: bool, signals: int) -> None:
    """To be called before this process executes another program in its place. `signals`: the descriptor from which those are
    read that it catches until then. Raises `OSError`."""
    os.environ[ADDRESS_VARIABLE] = _encode(address).decode()
    os.set_inheritable(signals, True)
    os.environ[SIGNALS_VARIABLE] = str(signals)
    if quiet:
        os.environ[QUIET_VARIABLE] = "1"
    if stuck:
        with nameless_file() as file:
            file.writelines(encode_outcome(outcome).encode() + b"\n" for outcome in stuck)
            file.seek(0)
            number = os.dup(file.fileno())
        os.set_inheritable(number, True)
        os.environ[STUCK_VARIABLE] = str(number)


def inherited_outcomes() -> list[Outcome]:
    """The outcomes that the process which we replaced has left to report."""
    number = os.environ.pop(STUCK_VARIABLE, None)
    if number is None:
        return []
    with os.fdopen(int(number), "rb") as file:
        return [decode_outcome(line) for line in file]


def inherited_address() -> Address | None:
    """Where they are to be reported; None if this process has replaced none, or one of a version that did not say so."""
    told = os.environ.pop(ADDRESS_VARIABLE, None)
    return None if told is None else msgspec.json.decode(told, type=Address)


def inherited_signals() -> set[int]:
    """The signals that the process which we replaced had caught, and nobody has heard."""
    number = os.environ.pop(SIGNALS_VARIABLE, None)
    if number is None:
        return set()
    with os.fdopen(int(number), "rb", buffering=0) as pipe:
        return set(pipe.read(4096) or b"")


def inherited_quiet() -> bool:
    """Whether the process that we replaced, or our supervisor, was told to claim nothing more."""
    return os.environ.pop(QUIET_VARIABLE, None) is not None
