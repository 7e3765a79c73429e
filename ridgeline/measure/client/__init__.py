"""The load client: sends a workload's requests to a target and records when tokens arrive.

load_client.py        runs a workload against a target → RunTrace
target.py             the Target protocol, and the recorder of one request
engine_target.py      an engine in this process
http_target.py        any OpenAI-compatible server
http_connection.py    HTTP/1.1 over asyncio · sse_parser.py · stream_chunks.py
"""
