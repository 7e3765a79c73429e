"""Climbs the ladder: measure, diagnose, apply, verify quality and cost, keep what is proven.

ladder.py   the rungs as data (ladder.toml)     predict.py   what each promises, simulated
loop.py     the climb                           ranking.py   which rung is next
comparison.py     two configurations in alternation   cut.py       how long a run has to be
checks.py   the same tokens, or within the gate quality/     the panel that is the gate
result.py   what was found    report/  config.py  vllm.py  write.py   how it is handed over
"""
