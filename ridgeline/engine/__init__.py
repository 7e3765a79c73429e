"""The inference engine: the scheduler decides (without torch), the other packages compute.

`engine.Engine` is the public entry point.
"""
