"""Who waits and who runs: the sequence registry, its queues, and request deadlines."""
