"""How the served model marks its thinking, for thinking budgets."""

from __future__ import annotations

from ridgeline.config.server import ServerOptions
from ridgeline.records import ThinkingMarks
from ridgeline.serve.output_parsers.harmony import CHANNEL, ENDS, MESSAGE, START
from ridgeline.serve.output_parsers.reasoning import CLOSE, OPEN

_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_ANSWER = f"{START}assistant{CHANNEL}final{MESSAGE}"


def thinking_marks(options: ServerOptions) -> ThinkingMarks | None:
    """The marks by the server's reasoning parser and `--reasoning-config`; None without a parser.

    Text of `reasoning_end_str` before the end mark is part of the forced end, as in vLLM.
    """
    if options.reasoning_parser is None:
        return None
    if options.reasoning_parser == "openai_gptoss":
        start, end, forced_end = _ANALYSIS, ENDS[0], ENDS[0] + _ANSWER
    else:
        start, end, forced_end = OPEN, CLOSE, CLOSE
    config = options.reasoning_config
    if config is None:
        return ThinkingMarks(start, end, forced_end)
    return ThinkingMarks(
        config.reasoning_start_str or start, end, config.reasoning_end_str or forced_end
    )
