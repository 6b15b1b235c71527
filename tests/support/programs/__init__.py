"""Drawn durable programs, played on a real database with and without faults (tests/simulation/test_programs.py)."""
