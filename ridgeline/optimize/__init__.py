"""The optimisation loop: measure, diagnose, apply, verify quality and cost, keep what is proven.

ladder.py       the rungs as data (ladder.toml)
ranking/        predicts each rung's gain by simulation and picks the next one
search.py       the loop: baseline, trials, closing comparison
comparison/     two configurations measured in alternation
trial_checks.py same tokens for exact rungs, the quality panel for lossy ones
quality/        the panel: perplexity, KL divergence, agreement, tasks
external/       the same search on a server that is not this engine
result.py       the records of the result; report/ and output/ present them
"""
