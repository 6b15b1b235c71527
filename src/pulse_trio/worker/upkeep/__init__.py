"""What any worker does for the whole schema: rescues what dead workers held, fires schedules, finishes batches."""
