"""The climb on a server that is not this engine: its flags as data, its process, its token times.

`ridgeline optimize MODEL --url … --restart-cmd '… {flags}'` restarts somebody else's server with
other flags and measures it over HTTP, with the same comparison, the same SLO and the same ladder.
"""
