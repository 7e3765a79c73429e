"""Load, observation and metrics: what was asked of a server, what happened, and what that means.

    workload/     what is asked: prompts x output lengths             → LoadRequest
    arrivals.py   when: closed loop, constant, Poisson, gamma
    target.py     of whom: the Protocol, and the recorder of one request
      inprocess.py   an engine in this process
      http.py        any OpenAI-compatible server (wire.py, sse.py, chunks.py)
      mock/          a server that keeps to a script: ground truth
    server/       what a server tells of itself (/metrics), under one set of names
    client.py     brings the three together                           → RunTrace
    metrics.py · goodput.py · steps.py · summary.py   pure functions over a RunTrace
    window.py     without warm-up and cool-down · cost.py   dollars
    results/      result files of six tools, and judgements between two of them
    report/       HTML page, Chrome trace, vLLM's console block
    log.py        a RunTrace on disk, losslessly
    search.py     the largest load that keeps the SLO
    bench.py      one bench run from its options; vllm_result.py its result in vLLM's keys

The definitions are in docs/concepts/measurements.md. Nothing here imports an engine.
"""
