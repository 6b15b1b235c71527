"""Several processes: the supervisor and its children, what passes between them, and the quarantine's own process."""
