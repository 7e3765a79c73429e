"""Imports torch with the garbage collector at rest: whoever imports this before torch waits less.

The import makes some 170,000 objects that live as long as the process. The collector, which comes
the more often the more is made, would walk them hundreds of times and find nothing: a twelfth of
the time of the whole import (docs/concepts/kernels.md).
"""

from __future__ import annotations

import gc

_was_collecting = gc.isenabled()
gc.disable()
try:
    import torch  # noqa: F401
finally:
    if _was_collecting:
        gc.enable()
