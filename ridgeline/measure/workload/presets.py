"""Named shapes of load, each a `Synthetic` with documented lengths (log-normal, tokens).

    name              input   output   cv    shared prefix         what it stands for
    synthetic-chat     1,000     200   0.8   200, one               assistant with a system prompt
    rag                3,000     150   0.4   512, 16 by Zipf        passages, a question
    code-edit          1,800     300   0.6   1,024, 8 by Zipf       open files, a patch
    long-document     12,000     300   0.3   none                   summary of a report
    batch                500     100   0.5   128, one               classification at night

Chosen round, not fitted. For orientation: the Azure traces of 2023 have medians of 1,020 input and
129 output tokens (conversation) and 1,500 and 13 (code completion), Splitwise, arXiv 2311.18677.
Options override: `rag:output=64`. A model with a shorter context needs `input` lowered the same
way. Random token ids: see synthetic.py for what that hides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from ridgeline.measure.workload.synthetic import Synthetic, options_of

PRESETS: Mapping[str, Synthetic] = MappingProxyType(
    {
        "synthetic-chat": Synthetic(input=1000, output=200, cv=0.8, prefix=200),
        "rag": Synthetic(input=3000, output=150, cv=0.4, prefix=512, groups=16),
        "code-edit": Synthetic(input=1800, output=300, cv=0.6, prefix=1024, groups=8),
        "long-document": Synthetic(input=12000, output=300, cv=0.3),
        "batch": Synthetic(input=500, output=100, cv=0.5, prefix=128),
    }
)


def preset(name: str) -> Callable[[str], Synthetic]:
    """The reader of one preset's options."""

    def read(options: str) -> Synthetic:
        return msgspec.structs.replace(PRESETS[name], **options_of(options))

    return read


synthetic_chat = preset("synthetic-chat")
rag = preset("rag")
code_edit = preset("code-edit")
long_document = preset("long-document")
batch = preset("batch")
