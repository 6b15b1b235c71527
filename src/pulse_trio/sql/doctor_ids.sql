-- By how many ids the sequence is behind the jobs that there are.
SELECT :"schema".ids_behind()
