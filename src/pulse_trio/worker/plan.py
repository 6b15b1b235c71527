"""A worker's settings, as its parts need them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..observe import Observer
    from ..settings import TermsOfQueues, WorkerSettings
    from .jobs.run_spans import RunSpans
    from .metrics.meter import JobMeter


@dataclass(frozen=True, slots=True)
class Plan:
    """What all parts of one worker have in common; made when it starts. `burst`: the worker ends when nothing is due. `meter`
    counts its jobs, if it has metrics; `spans` has their spans, if an instrument makes some. `on_lease` is the program's hook,
    where queues have leases of their own: it receives the shortest lease (seconds) among claimed jobs before they begin."""

    settings: WorkerSettings
    terms: TermsOfQueues
    observer: Observer
    burst: bool = False
    meter: JobMeter | None = None
    spans: RunSpans | None = None
    on_lease: Callable[[float], None] | None = None
    made_at: float = field(default_factory=time.time, init=False)
    """When the program had imported the handlers, in seconds since 1970."""
