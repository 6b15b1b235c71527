"""What the tests share: a PostgreSQL, databases on it, a faulty network, real processes."""
