"""Judges what store/health.py reads: plain functions over collected facts, for the command and the web page."""

from .claiming import judge_attempts, judge_slots, judge_stopping, judge_unserved
from .findings import JUDGED, ONLY_METRICS, RUNBOOK, Finding
from .jobs import crashes_of, diagnose
from .server import judge_failure, judge_line, judge_pooler, judge_server

__all__ = [
    "JUDGED",
    "ONLY_METRICS",
    "RUNBOOK",
    "Finding",
    "crashes_of",
    "diagnose",
    "judge_attempts",
    "judge_failure",
    "judge_line",
    "judge_pooler",
    "judge_server",
    "judge_slots",
    "judge_stopping",
    "judge_unserved",
]
