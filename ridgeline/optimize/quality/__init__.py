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

from ridgeline.optimize.quality.greedy_divergence import (
    Divergence,
    LengthDrift,
    divergence,
    length_drift,
)
from ridgeline.optimize.quality.sequential import QualityVerdict, SequentialPanel
from ridgeline.optimize.quality.task_questions import (
    Task,
    TaskPanelPart,
    TaskReference,
    TaskScore,
    make_tasks,
)
from ridgeline.optimize.quality.text_comparison import (
    Array,
    LogprobsOf,
    TextPanelPart,
    TextReference,
    WindowComparison,
    cut_windows,
)
from ridgeline.optimize.quality.thresholds import (
    GateVerdict,
    PanelSize,
    QualityLimits,
    ThresholdCheck,
    load_quality_limits,
)

__all__ = [
    "Array",
    "Divergence",
    "GateVerdict",
    "LengthDrift",
    "LogprobsOf",
    "PanelSize",
    "QualityLimits",
    "QualityVerdict",
    "SequentialPanel",
    "Task",
    "TaskPanelPart",
    "TaskReference",
    "TaskScore",
    "TextPanelPart",
    "TextReference",
    "ThresholdCheck",
    "WindowComparison",
    "cut_windows",
    "divergence",
    "length_drift",
    "load_quality_limits",
    "make_tasks",
]
