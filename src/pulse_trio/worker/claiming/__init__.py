"""Takes jobs from the queues: the claim loop, where and when it looks, and jobs that must run alone."""
