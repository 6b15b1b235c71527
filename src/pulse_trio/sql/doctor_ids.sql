-- How many ids the sequence is behind the highest job.
SELECT :"schema".ids_behind()
