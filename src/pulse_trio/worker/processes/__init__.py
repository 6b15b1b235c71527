"""Several processes: the supervisor and its children, the messages between them, and the quarantine's own process."""
