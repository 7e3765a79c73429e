"""A twin: the real server and scheduler on a device that is only modelled.

Requests, batching, prefix cache, admission and metrics are those of the engine. Only the runner is
replaced: it waits as long as the step-time model says, and answers with synthetic tokens.
"""
