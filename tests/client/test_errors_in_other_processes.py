"""Every error, and a reference, arrives in another process as it was: `multiprocessing` hangs on one that does not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from pulse_trio import Handlers, PartlyEnqueued, errors, open_client
from pulse_trio.errors import PulseTrioError
from pulse_trio.store.new_jobs import Enqueued

GIVEN: dict[str, dict[str, Any]] = {
    "JobExists": {"job_id": 7},
    "PartlyEnqueued": {"enqueued": [Enqueued(7, True)]},
    "ResourceFailed": {"detail": "a traceback"},
    "FailedBefore": {"failure": "ValueError: no"},
    "StepFailed": {"step": "charge"},
}
KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PulseTrioError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_as_it_was(kind: type[PulseTrioError]) -> None:
    given: dict[str, Any] = {"job": "the record"} if issubclass(kind, errors.JobError) else GIVEN.get(kind.__name__, {})
    error = kind("what happened", **given)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- our own
    assert (type(again), str(again), vars(again)) == (kind, "what happened", vars(error))
    assert vars(again) == {**given, "__notes__": ["a note"]}


async def test_a_reference_arrives_as_what_was_enqueued(dsn: str) -> None:
    handlers = Handlers()

    @handlers.job
    async def add(n: int) -> int:
        return n

    def requests() -> Any:
        yield add.request(1)
        yield add.request(2)
        raise ValueError("the file is cut short")

    async with open_client(dsn) as client:
        with pytest.raises(PartlyEnqueued) as raised:
            await client.enqueue_many(requests(), chunk=1)
        ids = [ref.id for ref in raised.value.enqueued]
        again = pickle.loads(pickle.dumps(raised.value))  # noqa: S301 -- our own
    assert again.enqueued == [Enqueued(job_id, True) for job_id in ids]
