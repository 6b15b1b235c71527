"""Running one job: what the worker holds of it, the tasks that run jobs, and how each kind of handler is called."""
