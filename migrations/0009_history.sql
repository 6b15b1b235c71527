-- History: what people look for in the archive, and how long each queue keeps it.
--
-- Theory. Nothing here costs a completed job anything: the two indexes are partial, on what few finished jobs have (another
-- end than completed, a unique key), and a list of all jobs walks job_archive_id.
-- On an archive that is large already this holds up settlements while the indexes are built: migrate in a quiet hour.
CREATE INDEX job_archive_failed ON :"schema".job_archive (id) WHERE state <> 4;
CREATE INDEX job_archive_unique ON :"schema".job_archive (unique_key, id) WHERE unique_key IS NOT NULL;
