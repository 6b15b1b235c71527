"""Background jobs for Trio on PostgreSQL."""
