"""Finds handlers that block the event loop or do not end: the loop's lag, stuck handlers, stacks."""
