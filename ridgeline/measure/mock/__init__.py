"""A scripted server: the ground truth for load clients.

script.py   what is sent when, and what a client should measure   → Script, ExpectedMetrics
cases.py    one script per peculiarity of real servers            → CASES
pace.py     regular answers of the requested length               → MockPace
server.py   HTTP over any asyncio transport                       → MockServer
"""
