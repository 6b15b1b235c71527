"""Durable handlers: what an attempt remembers, and what it waits for."""
