INSERT INTO :"schema".batch (name) VALUES (%(name)s) RETURNING id
