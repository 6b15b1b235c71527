"""Keeps the leases of claimed jobs until their outcomes are written: heartbeats, reports, cancellations and progress."""
