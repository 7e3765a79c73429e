"""A process that works off a batch store until it is killed: `python killed.py STORE`."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from ridgeline.serve.batch.records import Lease, Outcome
from ridgeline.serve.batch.store import Store
from ridgeline.serve.batch.worker import Worker, WorkerOptions


async def answer(lease: Lease) -> Outcome:
    """Now and then a line fails; every answer takes a moment."""
    await asyncio.sleep(random.random() * 0.01)
    text = b'{"custom_id":"%s"}' % lease.custom_id.encode()
    return Outcome(
        lease=lease,
        succeeded=lease.place % 7 != 0,
        result=text,
        prompt_tokens=1,
        completion_tokens=2,
    )


def main() -> None:
    store = Store(Path(sys.argv[1]))
    print("open", flush=True)
    worker = Worker(store, answer, WorkerOptions(most=8, beat_s=0.02))
    asyncio.run(worker.run_until_idle())
    store.close()


if __name__ == "__main__":
    main()
