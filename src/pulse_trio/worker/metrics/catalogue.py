"""Every metric, once: its name, type, labels and help. docs/reference/metrics.md is generated from this table.

No label takes more values than this module allows, whatever producers write into rows: `kind` is a kind that this worker has a
handler for, `queue` one that it serves or declares, or one of the first `QUEUES` others that it meets; every other value
counts as `other`. Pairs of both are bounded by `PAIRS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

OTHER: Final = "other"
"""The label of what has none of its own."""
QUEUES: Final = 100
"""Queues with a label of their own, beside those that the worker serves or declares."""
PAIRS: Final = 100
"""Pairs of queue and kind with labels of their own, beside those of the worker's own queues and kinds. Most of what a scrape
costs is the text of their buckets."""
SCHEDULES: Final = 100
"""Schedules with a label of their own, the first by name."""

WAITS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
RUNS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
STATEMENTS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `together` says how the values of several processes become one; for a histogram, `bounds` are its upper
    bounds in seconds."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    together: Literal["sum", "max", "min"] = "sum"
    bounds: tuple[float, ...] = ()


METRICS: Final = (
    Metric("pulse_jobs_started_total", "counter", ("queue", "kind"), "Attempts whose handler was called."),
    Metric(
        "pulse_jobs_ended_total",
        "counter",
        ("queue", "kind", "outcome"),
        "Attempts that ended in this worker, by outcome: completed, failed, timeout, discarded, cancelled, snoozed, released, "
        "suspended (a durable job that waits without a slot), or lost (another attempt owns the job). An attempt that was "
        "refused before it began is counted here only.",
    ),
    Metric(
        "pulse_job_wait_seconds",
        "histogram",
        ("queue",),
        "Seconds from the moment a job was due until the claim that brought it to a worker. The buckets are exact; the sum is "
        "within 6 %, because jobs of one claim whose waits are within a tenth of each other count with their mean.",
        bounds=WAITS,
    ),
    Metric(
        "pulse_job_run_seconds",
        "histogram",
        ("queue", "kind"),
        "Seconds from the call of a handler until the attempt ended.",
        bounds=RUNS,
    ),
    Metric("pulse_jobs_running", "gauge", ("queue",), "Jobs whose handler runs now."),
    Metric("pulse_worker_slots", "gauge", (), "Jobs that may run at once (the setting concurrency, of all processes)."),
    Metric(
        "pulse_queue_jobs",
        "gauge",
        ("queue", "state"),
        "Live jobs of a queue: available (due), scheduled (due later), suspended (durable jobs that wait without a slot) or "
        "running. Available and running jobs are counted together, up to a bound of 10000 rows (less where there are many "
        "queues), and so are scheduled ones: at the bound the values are at least as high. Use pulse_queue_oldest_seconds for "
        "alerts. Reported by one worker of the schema at a time.",
        "max",
    ),
    Metric(
        "pulse_queue_oldest_seconds",
        "gauge",
        ("queue",),
        "For how long the oldest available job of a queue has been due; 0 if there is none. Reported by one worker of the "
        "schema at a time.",
        "max",
    ),
    Metric(
        "pulse_claim_seconds",
        "histogram",
        (),
        "Seconds that a claim took, with the completions that travel with it.",
        bounds=STATEMENTS,
    ),
    Metric("pulse_settle_seconds", "histogram", (), "Seconds that a report of outcomes took.", bounds=STATEMENTS),
    Metric(
        "pulse_beat_seconds",
        "histogram",
        (),
        "Seconds that a heartbeat took: for the leases of jobs, or as a sign of life of the worker.",
        bounds=STATEMENTS,
    ),
    Metric("pulse_reports_pending", "gauge", (), "Outcomes that are not written yet."),
    Metric(
        "pulse_leases_lost_total",
        "counter",
        ("reason",),
        "Leases that this worker lost, each once: lease-unproven (it could not be renewed in time), or else fence-lost "
        "(another attempt owns the job, or it was ended elsewhere).",
    ),
    Metric(
        "pulse_rescued_total",
        "counter",
        (),
        "Attempts of vanished workers that this watchdog ended: their jobs are due again, or dead.",
    ),
    Metric(
        "pulse_quarantined_jobs",
        "gauge",
        (),
        "Jobs in quarantine because their workers died with them, up to 1000. Reported by one worker of the schema at a time.",
        "max",
    ),
    Metric(
        "pulse_loop_lag_seconds",
        "gauge",
        (),
        "The longest delay of the event loop in the last 15 seconds. A handler that blocks it makes it grow.",
        "max",
    ),
    Metric(
        "pulse_database_up",
        "gauge",
        (),
        "1 if the database answers this worker, else 0. Missing until it has answered first, or has not in time.",
        "min",
    ),
    Metric(
        "pulse_schedule_late_seconds",
        "gauge",
        ("schedule",),
        "For how long the next occurrence of a schedule has been due without having been fired; 0 if it is not late. Reported "
        "by one worker of the schema at a time.",
        "max",
    ),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}
