"""The functions of the public API: keywords in, a workflow called, its record out.

`import ridgeline` resolves them on first use. Each module imports its workflows, none prints.
"""
