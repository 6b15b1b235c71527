SELECT has_function_privilege(format('%%I.ids_behind()', :'schema')::regprocedure, 'EXECUTE'),
       has_function_privilege(format('%%I.unfinished_clean_ups(bigint[])', :'schema')::regprocedure, 'EXECUTE'),
       has_function_privilege(format('%%I.trees_that_wait(int, int)', :'schema')::regprocedure, 'EXECUTE'),
       -- Counting queues with bounds asks it about suspended jobs; a role that only reads the tables counts them by the view.
       has_function_privilege(format('%%I.is_suspended(bigint, int)', :'schema')::regprocedure, 'EXECUTE')
