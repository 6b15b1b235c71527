"""Runs one job: the worker's record of it, the tasks that run jobs, and how each kind of handler is called."""
