"""`/metrics`: request latencies and counts, engine counters, cost."""
