-- The columns that its producer wrote. bury.sql may have to leave them out.
args, options, unique_key, key
