"""A server that does nothing but keep to a script: the ground truth of a load client.

script.py   what is sent at which instant, and what a client ought to measure → Script, Truth
cases.py    one script per oddity of real servers                             → CASES
pace.py     regular answers of the length that was asked for                  → Pace
server.py   HTTP over any asyncio transport                                   → MockServer
"""
