"""`/metrics`, `/healthz` and `/readyz`: counts what a worker does, and serves it over HTTP."""
