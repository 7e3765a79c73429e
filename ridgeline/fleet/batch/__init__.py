"""`/v1/files` and `/v1/batches` of a fleet.

stores.py   which batch store has a file or a batch, and the servers that open it
lists.py    the lists of several stores as one
routes.py   the requests of clients
"""
