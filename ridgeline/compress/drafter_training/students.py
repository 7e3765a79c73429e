"""Trainable versions of the Medusa and EAGLE drafters of `ridgeline.engine.speculate`.

The objective is acceptance. A sampled draft is accepted with probability sum min(p, q) of the
target's p and the drafter's q, a greedy one if both agree on the most likely token. Far from p the
cross-entropy with p has the better gradient; near it -log of the acceptance matters: the weight
moves from the first to the second during training.

Shape suffixes: B windows, L positions, K heads, C hidden_size, V vocabulary, H heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.engine.model.decoder import Decoder, final_logits
from ridgeline.engine.quant.dense import DenseLinear
from ridgeline.engine.speculate.drafters.eagle import EagleShape, normed
from ridgeline.engine.speculate.drafters.target_model import states
from ridgeline.errors import CannotRun

FADE = 0.8  # weight of each place against the one before
MAX_STATE_BYTES = 1 << 30  # of the teacher's states that are kept for windows that return
UNROLLED = 3  # places that eagle is trained on: its own output leads to all but the first


class DrafterBatch(NamedTuple):
    """Windows of text as the target sees them.

    `h_BLC[:, t]` is its state after token t, and `logits_BLV[:, t]` its logits for the next token
    over the vocabulary of `head_VC`: all tokens, or the candidates of a step.
    """

    tokens_BL: Tensor
    h_BLC: Tensor
    logits_BLV: Tensor
    head_VC: Tensor


class Teacher:
    """The frozen target model, with its LM head as plain numbers."""

    def __init__(self, decoder: Decoder) -> None:
        head = decoder.lm_head
        if not isinstance(head, DenseLinear) or head.bias_O is not None:
            raise CannotRun(
                "drafters are trained on a model's dense head",
                value=type(head).__name__,
                fix="name the unquantised checkpoint; the drafter serves quantised forms too",
            )
        self.decoder, self.head_VC = decoder, head.weight_OI.clone()
        self.embed_VC = decoder.table.rows(torch.arange(decoder.spec.vocab_size))
        self._states: dict[tuple[int, ...], Tensor] = {}
        self._nbytes = 0

    @torch.no_grad()
    def __call__(self, tokens_BL: Tensor, candidates_V: Tensor | None = None) -> DrafterBatch:
        """The windows as the model sees them. `candidates_V`: the tokens that logits are computed
        for; None: all.
        """
        h_BLC = torch.stack([self._states_of(tuple(row.tolist())) for row in tokens_BL])
        head_VC = self.head_VC if candidates_V is None else self.head_VC[candidates_V]
        return DrafterBatch(tokens_BL, h_BLC, self.logits(h_BLC, head_VC), head_VC)

    def logits(self, x_BLC: Tensor, head_VC: Tensor) -> Tensor:
        return final_logits(self.decoder.spec, F.linear(x_BLC, head_VC))

    def _states_of(self, tokens: tuple[int, ...]) -> Tensor:
        """The states after each token. A window that returns is not computed twice."""
        h_LC = self._states.get(tokens)
        if h_LC is None:
            h_LC = states(self.decoder, list(tokens)).clone()
            if self._nbytes + h_LC.nbytes <= MAX_STATE_BYTES:
                self._states[tokens] = h_LC
                self._nbytes += h_LC.nbytes
        return h_LC


class Student(Protocol):
    """A drafter in training."""

    def losses(self, batch: DrafterBatch, sharp: float) -> tuple[Tensor, list[Tensor]]:
        """The loss, and the acceptance at each drafted position."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the drafter's file."""
        ...


def accepted(logits_NV: Tensor, teacher_NV: Tensor, sharp: float) -> tuple[Tensor, Tensor]:
    """(loss, mean probability that a sampled draft is accepted). `sharp` 0: cross-entropy alone."""
    p_NV, log_q_NV = teacher_NV.softmax(-1), logits_NV.log_softmax(-1)
    chance_N = torch.minimum(p_NV, log_q_NV.exp()).sum(-1)
    entropy = -(p_NV * log_q_NV).sum(-1).mean()
    loss = entropy if not sharp else entropy - sharp * (chance_N + 1e-4).log().mean()
    return loss, chance_N.detach().mean()


class MedusaStudent(nn.Module):
    """`num_heads` residual layers, initially zero: every head starts as the LM head."""

    def __init__(self, teacher: Teacher, num_heads: int) -> None:
        super().__init__()
        size = teacher.decoder.spec.hidden_size
        self.teacher = teacher
        self.weight_KCC = nn.Parameter(torch.zeros(num_heads, size, size))
        self.bias_KC = nn.Parameter(torch.zeros(num_heads, size))

    def losses(self, batch: DrafterBatch, sharp: float) -> tuple[Tensor, list[Tensor]]:
        total, chances = torch.zeros(()), []
        for k in range(len(self.bias_KC)):
            x_BLC = batch.h_BLC[:, : -(k + 1)]
            z_BLC = x_BLC + F.silu(F.linear(x_BLC, self.weight_KCC[k], self.bias_KC[k]))
            said = self.teacher.logits(z_BLC, batch.head_VC).flatten(0, 1)
            loss, chance = accepted(said, batch.logits_BLV[:, k + 1 :].flatten(0, 1), sharp)
            total = total + FADE**k * loss
            chances.append(chance)
        return total, chances

    def tensors(self) -> dict[str, Tensor]:
        return {"heads.weight": self.weight_KCC, "heads.bias": self.bias_KC}


class EagleStudent(nn.Module):
    """The layer of `engine.speculate`'s EAGLE drafter, over whole windows."""

    def __init__(self, teacher: Teacher, shape: EagleShape, seed: int) -> None:
        super().__init__()
        self.teacher, self.shape = teacher, shape
        size = teacher.decoder.spec.hidden_size
        random = torch.Generator().manual_seed(seed)
        self.own = nn.ParameterDict(
            {
                name.removesuffix(".weight"): nn.Parameter(_first(name, shape, random))
                for name, shape in shape.shapes(size).items()
            }
        )
        with torch.no_grad():  # begin by passing the state on
            self.own["fc"][:, size:] += torch.eye(size)

    def losses(self, batch: DrafterBatch, sharp: float) -> tuple[Tensor, list[Tensor]]:
        """Position t reads token t and the state before it; at the i-th drafted position the state
        comes from i passes earlier. The keys of earlier passes represent the tokens known at that
        point.
        """
        tokens_BL, length = batch.tokens_BL[:, 1:], batch.tokens_BL.shape[1] - 1
        e_BLC = normed(F.embedding(tokens_BL, self.teacher.embed_VC).to(batch.h_BLC.dtype))
        h_BLC = batch.h_BLC[:, :-1]
        total, chances = torch.zeros(()), []
        past: list[tuple[Tensor, Tensor]] = []
        for i in range(UNROLLED):
            f_BLC, kv = self._layer(torch.cat((e_BLC, h_BLC), -1), past)
            past.append(kv)
            said = self.teacher.logits(f_BLC[:, i:], batch.head_VC).flatten(0, 1)
            loss, chance = accepted(said, batch.logits_BLV[:, i + 1 :].flatten(0, 1), sharp)
            near = F.smooth_l1_loss(f_BLC[:, i:], batch.h_BLC[:, i + 1 :])
            total = total + FADE**i * (loss + near)
            chances.append(chance)
            h_BLC = torch.cat((h_BLC[:, :1], f_BLC[:, : length - 1]), 1)
        return total, chances

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.weight": tensor for name, tensor in self.own.items()}

    def _layer(
        self, d_BLD: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        own, eps, size = self.own, self.shape.norm_eps, d_BLD.shape[-1] // 2
        x_BLC = F.linear(d_BLD, own["fc"])
        a_BLC = F.rms_norm(x_BLC, (size,), own["attention_norm"], eps)
        o_BLC, kv = self._attention(a_BLC, past)
        x_BLC = x_BLC + o_BLC
        m_BLC = F.rms_norm(x_BLC, (size,), own["mlp_norm"], eps)
        inner = F.silu(F.linear(m_BLC, own["gate"])) * F.linear(m_BLC, own["up"])
        x_BLC = x_BLC + F.linear(inner, own["down"])
        return F.rms_norm(x_BLC, (size,), own["norm"], eps), kv

    def _attention(
        self, a_BLC: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        own, shape = self.own, self.shape
        cos_LD, sin_LD = _rotary_tables(a_BLC.shape[1], shape)
        q_BHLD = _rotate(_heads(a_BLC, own["q"], shape), cos_LD, sin_LD)
        k_BHLD = _rotate(_heads(a_BLC, own["k"], shape), cos_LD, sin_LD)
        kv = k_BHLD, _heads(a_BLC, own["v"], shape)
        keys, values = (torch.cat(pieces, 2) for pieces in zip(*past, kv, strict=True))
        times = shape.num_heads // shape.num_kv_heads
        o_BHLD = F.scaled_dot_product_attention(
            q_BHLD,
            keys.repeat_interleave(times, 1),
            values.repeat_interleave(times, 1),
            attn_mask=visible_keys(a_BLC.shape[1], len(past)),
        )
        return F.linear(o_BHLD.transpose(1, 2).flatten(2), own["o"]), kv


def visible_keys(length: int, num_past: int) -> Tensor:
    """Which keys of each pass, side by side, the last pass sees.

    Its own position in its own pass, the position i earlier in the pass i before, and all before
    those in the first pass.
    """
    ago_LL = torch.arange(length)[:, None] - torch.arange(length)[None]
    passes = [ago_LL == num_past - i for i in range(1, num_past + 1)]
    return torch.cat([ago_LL >= num_past, *passes], 1)


def _first(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Initial values: gains are one, what adds to the stream is small, the rest keeps its input's
    scale.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    scale = 0.2 if name.startswith(("o.", "down.", "fc.")) else 1.0
    return torch.randn(shape, generator=random) * (scale / math.sqrt(shape[1]))


def _heads(a_BLC: Tensor, weight_OC: Tensor, shape: EagleShape) -> Tensor:
    o_BLO = F.linear(a_BLC, weight_OC)
    return o_BLO.view(*o_BLO.shape[:2], -1, shape.head_dim).transpose(1, 2)


def _rotary_tables(length: int, shape: EagleShape) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-half).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x_BHLD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    a, b = x_BHLD.chunk(2, -1)
    return x_BHLD * cos_LD + torch.cat((-b, a), -1) * sin_LD
