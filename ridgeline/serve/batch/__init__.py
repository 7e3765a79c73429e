"""Batch API: files of requests that are answered when there is room, at half price.

    upload ─▶ files, chunks                                          (files.py)
    create ─▶ batches: validating ─▶ in_progress ─▶ finalizing ─▶ completed
                            │             ├──▶ expired
                            ├─▶ failed    └──▶ cancelling ─▶ cancelled   (store.py)
    worker: lease lines ─▶ answer them ─▶ settle                     (worker.py, answering.py)

Everything that must survive lies in one SQLite file (schema.py); the worker holds nothing that a
`kill -9` could lose or do twice.
"""
