"""Keeping what was claimed until its outcome is written: heartbeats, reports, cancellations and progress."""
