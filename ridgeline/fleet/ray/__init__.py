"""A fleet on Ray Serve: Ray places, checks, restarts and replaces servers; the gateway routes.

Ray is not in the data path: every replica runs `ridgeline serve` as a process with its own port,
and clients talk to `ridgeline route`, which learns the ports from a file.
"""
