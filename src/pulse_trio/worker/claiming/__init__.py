"""Taking jobs from the queues: the claim loop, where it looks, what tells it to look, and jobs that must run alone."""
