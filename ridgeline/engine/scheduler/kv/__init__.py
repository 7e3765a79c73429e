"""KV cache bookkeeping: block pool, block tables, prefix cache and the memory budget.

No tensors.
"""
