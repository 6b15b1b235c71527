SELECT :"schema".wake(queue) FROM unnest(%(queues)s::text[]) queue
