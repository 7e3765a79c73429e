"""What servers tell of themselves, under the names that each of them uses.

names.toml   one table per server: our name → its metrics
scrape.py    /metrics read during a run, and what the readings say → ServerReport
"""
