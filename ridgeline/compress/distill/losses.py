"""What a student minimises, of one window.

  logits      KL(p ‖ q) over the teacher's stored tokens and one class for all others (Hinton et al.
              2015, arXiv 1503.02531, at temperature 1)
  sequence    -log q of the text, which the teacher has written (Kim & Rush 2016, arXiv 1606.07947)

Merging classes never increases a KL divergence, so the first is a lower bound of the full one; it
is zero where the student gives the stored tokens the teacher's probabilities.

Shape suffixes: T tokens, V vocabulary, K stored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.compress.distill.teacher_cache import TopLogprobs

LEAST = 1e-6  # probability of all other tokens, in the half precision of the stored ones


def top_k_divergence(logits_TV: Tensor, teacher: TopLogprobs) -> Tensor:
    """The mean KL divergence of a position, in nats."""
    p_TK = teacher.logprobs_TK.exp()
    log_q_TK = logits_TV.gather(-1, teacher.ids_TK) - logits_TV.logsumexp(-1, keepdim=True)
    known = (p_TK * (teacher.logprobs_TK - log_q_TK)).sum(-1)
    if teacher.ids_TK.shape[1] == logits_TV.shape[1]:
        return known.mean()
    p_rest_T = (1 - p_TK.sum(-1)).clamp(min=LEAST)
    q_rest_T = (1 - log_q_TK.exp().sum(-1)).clamp(min=LEAST)
    return (known + p_rest_T * (p_rest_T.log() - q_rest_T.log())).mean()


def text_loss(logits_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    """The mean negative log-probability of each next token, in nats."""
    return F.cross_entropy(logits_TV[:-1], torch.tensor(tokens[1:]))
