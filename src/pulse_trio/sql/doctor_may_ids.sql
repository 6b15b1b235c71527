SELECT has_function_privilege(format('%%I.ids_behind()', :'schema')::regprocedure, 'EXECUTE')
