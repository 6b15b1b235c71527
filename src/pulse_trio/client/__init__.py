"""Enqueue, wait and inspect: what an application does with jobs.

    async with open_client(dsn) as client:
        ref = await client.enqueue(send_welcome, 42, template="vip")
        value = await ref.result()

The same under Trio and under asyncio. A client has a small pool of its own, or works inside a transaction of the caller's
(`using`): the job then appears if and only if that transaction commits. Everything is checked before anything is written.
"""

from .batches import Batch, BatchResult
from .client import Client, open_client
from .refs import JobRef
from .requests import request_by_name
from .sync import SyncClient

__all__ = ["Batch", "BatchResult", "Client", "JobRef", "SyncClient", "open_client", "request_by_name"]
