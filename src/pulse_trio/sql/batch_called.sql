UPDATE :"schema".batch SET callback_job_id = %(job)s::bigint, callback_error = %(error)s WHERE id = %(id)s::bigint RETURNING id
