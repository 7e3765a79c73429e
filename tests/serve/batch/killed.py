"""A process that runs batches until it is killed: `python killed.py STORE`."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from ridgeline.serve.batch.records import BatchResult, Lease
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker, WorkerOptions


async def execute(lease: Lease) -> BatchResult:
    """Some requests fail; all take a moment."""
    await asyncio.sleep(random.random() * 0.01)
    text = b'{"custom_id":"%s"}' % lease.custom_id.encode()
    return BatchResult(
        lease=lease,
        succeeded=lease.place % 7 != 0,
        line=text,
        prompt_tokens=1,
        completion_tokens=2,
    )


def main() -> None:
    store = BatchStore(Path(sys.argv[1]))
    print("open", flush=True)
    worker = BatchWorker(store, execute, WorkerOptions(max_concurrency=8, poll_s=0.02))
    asyncio.run(worker.run_until_idle())
    store.close()


if __name__ == "__main__":
    main()
