"""Does a lossy change still say the same? One panel, for `ridgeline eval` and as `optimize`'s gate.

    text.py         held-out text, paired: perplexity, KL (mean and p99.9), greedy agreement
    tail.py         the interval of an extreme quantile
    tasks.py        generated questions with one right answer: arithmetic, code, recall
    greedy.py       where greedy answers part, and whether they grow longer or shorter
    sequential.py   reads on until every threshold is decided, without finding passes in noise
    thresholds.py   quality.toml

"Inconclusive" is an answer. Nothing here knows an engine: a model is a function from tokens to the
log-probabilities after each of them.
"""

from ridgeline.optimize.quality.greedy import Divergence, LengthDrift, divergence, length_drift
from ridgeline.optimize.quality.sequential import Examination, Quality
from ridgeline.optimize.quality.tasks import (
    Task,
    TaskQuestion,
    TaskReference,
    TaskScore,
    make_tasks,
)
from ridgeline.optimize.quality.text import (
    Array,
    LogprobsOf,
    Reference,
    TextQuestion,
    Window,
    windows,
)
from ridgeline.optimize.quality.thresholds import Check, Gate, GateSize, GateVerdict, shipped

__all__ = [
    "Array",
    "Check",
    "Divergence",
    "Examination",
    "Gate",
    "GateSize",
    "GateVerdict",
    "LengthDrift",
    "LogprobsOf",
    "Quality",
    "Reference",
    "Task",
    "TaskQuestion",
    "TaskReference",
    "TaskScore",
    "TextQuestion",
    "Window",
    "divergence",
    "length_drift",
    "make_tasks",
    "shipped",
    "windows",
]
