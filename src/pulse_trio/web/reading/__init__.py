"""What the pages show, read from the database into records: no HTML here, and no statement without a bound."""
