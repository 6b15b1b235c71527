SELECT statement_timestamp(), (SELECT declared FROM :"schema".schedule WHERE name = %(name)s)
