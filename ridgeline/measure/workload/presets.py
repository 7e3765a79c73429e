"""Named synthetic workloads with documented lengths (log-normal, in tokens).

    name              input   output   cv    shared prefix         models
    synthetic-chat     1,000     200   0.8   200, one               assistant with a system prompt
    rag                3,000     150   0.4   512, 16 by Zipf        passages and a question
    code-edit          1,800     300   0.6   1,024, 8 by Zipf       open files and a patch
    long-document     12,000     300   0.3   none                   summary of a report
    batch                500     100   0.5   128, one               classification at night

Round numbers, not fitted. For comparison, the Azure traces of 2023 have medians of 1,020 input and
129 output tokens (conversation) and 1,500 and 13 (code completion), Splitwise, arXiv 2311.18677.
Options override: `rag:output=64`. Lower `input` the same way for a
model with a shorter context. Prompts are random token ids, which mislead wherever the text matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from ridgeline.measure.workload.synthetic import Synthetic, parse_options

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
    """A function that parses the options of one preset."""

    def read(options: str) -> Synthetic:
        return msgspec.structs.replace(PRESETS[name], **parse_options(options))

    return read


synthetic_chat = preset("synthetic-chat")
rag = preset("rag")
code_edit = preset("code-edit")
long_document = preset("long-document")
batch = preset("batch")
