"""Enqueue, wait and inspect: what an application does with jobs.

    async with open_client(dsn) as client:
        ref = await client.enqueue(send_welcome, 42, template="vip")
        value = await ref.result()

The same client works under Trio and under asyncio. It has its own small pool, or works inside the caller's transaction
(`using`): the job then appears if and only if that transaction commits. The client checks everything before it writes
anything.
"""

from .batches import Batch, BatchResult
from .client import Client, open_client
from .refs import JobRef
from .requests import request_by_name
from .sync import SyncClient
from .sync_batches import SyncBatch

__all__ = ["Batch", "BatchResult", "Client", "JobRef", "SyncBatch", "SyncClient", "open_client", "request_by_name"]
