-- And what its producer wrote. bury.sql may have to leave that out.
args, options, unique_key, key
