"""Load, observation and metrics. Definitions: docs/concepts/measurements.md.

workload/            what is sent (prompts × output lengths), and when (arrivals.py)
client/              sends it to an engine or server → RunTrace
mock/                a scripted server: ground truth for clients
monitors/            the server's metrics and its machine, observed during a run
metrics/             latency, goodput, utilisation: pure functions over a RunTrace
results/             result files of six tools, and comparisons of two of them
report/              HTML page, Chrome trace, vLLM's console block
bench_options.py     one bench run from its options
goodput_search.py    the largest load that meets the SLO

Nothing here imports an engine.
"""
