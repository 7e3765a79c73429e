"""Batch API: files of requests that run when the engine has room, at half price.

    upload ─▶ files, chunks                                          (uploads.py, files.py)
    create ─▶ batches: validating ─▶ in_progress ─▶ finalizing ─▶ completed
                            │             ├──▶ expired
                            ├─▶ failed    └──▶ cancelling ─▶ cancelled   (store.py)
    worker: lease batch requests ─▶ run them ─▶ settle               (worker.py, executor.py)

All state is in one SQLite file (database.py); the worker holds nothing that a `kill -9` could lose,
or make it do twice.
"""
