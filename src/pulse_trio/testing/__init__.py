"""For tests of applications: which jobs were enqueued, what their handlers do, and whether these survive a crash.

The fixtures (`pulse_dsn`, `pulse_client`, `pulse_sync_client`, `pulse_worker`, `pulse_clock`, `pulse_handlers`) come with
pytest's plugin, which is installed with pulse-trio.
"""

from .clock import PulseClock
from .crashing import CrashRun, NeverEnds, crash_points
from .databases import pulse_database
from .draining import PulseWorker
from .durable_runs import ChildRun, StepRun
from .enqueued import assert_enqueued, enqueued, refute_enqueued
from .job_runs import JobRun
from .running import run_job, run_job_sync

__all__ = [
    "ChildRun",
    "CrashRun",
    "JobRun",
    "NeverEnds",
    "PulseClock",
    "PulseWorker",
    "StepRun",
    "assert_enqueued",
    "crash_points",
    "enqueued",
    "pulse_database",
    "refute_enqueued",
    "run_job",
    "run_job_sync",
]
