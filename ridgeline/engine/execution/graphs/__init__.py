"""Decode steps captured once and replayed: CUDA graphs, their buckets, and their inputs.

buckets.py   the sizes that steps are padded to
inputs.py    a step's integers, in one transfer
decode.py    capture, replay, and what the runner calls
pieces.py    steps with prompts: graphs between their attention calls
ahead.py     the next step on the device before the last one is read
  warm_up.py   compiles the kernels before the first request
"""
