"""What every worker does for the whole schema: it rescues the jobs of dead workers, fires schedules and finishes batches."""
