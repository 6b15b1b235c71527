"""No models: Django tells only apps that have this module that `migrate` has ended (apps.py)."""
