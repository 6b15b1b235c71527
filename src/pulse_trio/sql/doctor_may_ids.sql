SELECT has_function_privilege(format('%%I.ids_behind()', :'schema')::regprocedure, 'EXECUTE'),
       has_function_privilege(format('%%I.stuck_trees(int)', :'schema')::regprocedure, 'EXECUTE')
