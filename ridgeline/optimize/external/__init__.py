"""Optimises a server that is not this engine: its flags as data, its process, its inferred steps.

`ridgeline optimize MODEL --url … --restart-cmd '… {flags}'` restarts an external server with other
flags and measures it over HTTP, with the same comparison, SLO and ladder.
"""
