"""The demo models' network and optimiser, small enough to read in one sitting.

Parameter names equal those of Hugging Face's ``LlamaForCausalLM``, so that the state dict is
the export.  The optimiser is Muon (Jordan et al., 2024; Liu et al., arXiv:2502.16982) on the
matrices and AdamW on embeddings and norms: at a fixed number of FLOPs it gets further than
AdamW alone, and FLOPs are what a two-core machine lacks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Architecture of one model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    max_positions: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position, in Hugging Face's half-split layout."""
    half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions).float(), shape.theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, s.heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = s.heads // s.kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, s.hidden))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Named ``model`` in the parent so that parameter names match the export format."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class TinyLlama(nn.Module):
    """A Llama with tied embeddings that returns hidden states, logits or a loss."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Fan-in initialisation; residual outputs start at zero so that depth starts shallow."""
        gen = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
            elif p.ndim == 2:
                std = 0.02 if "embed" in name else p.shape[1] ** -0.5
                p.normal_(0.0, std, generator=gen)

    def hidden(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        return self.model(ids, self.cos[:length], self.sin[:length])

    def logits(self, ids: Tensor) -> Tensor:
        return self.hidden(ids) @ self.model.embed_tokens.weight.T

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean next-token cross-entropy."""
        x = self.hidden(ids).flatten(0, 1)
        return F.cross_entropy(x @ self.model.embed_tokens.weight.T, targets.flatten())


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: push all singular values of a batch of matrices towards one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + torch.baddbmm(s, s, s, beta=b, alpha=c) @ x
    return x.mT if tall else x


class Optimiser:
    """Muon for matrices, AdamW for the rest, with state that is plain named tensors.

    The state being plain tensors lets a checkpoint be one safetensors file.
    """

    def __init__(
        self, model: nn.Module, lr_matrix: float, lr_rest: float, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is what Newton-Schulz iterates in; bfloat16 is enough for it (Jordan et al.)."""
        self.lr_matrix, self.lr_rest, self.dtype = lr_matrix, lr_rest, dtype
        self.momentum, self.decay = 0.95, 0.01
        self.betas, self.eps, self.count = (0.9, 0.95), 1e-10, 0
        self.matrices: dict[torch.Size, list[str]] = defaultdict(list)
        self.rest: list[str] = []
        self.params = dict(model.named_parameters())
        self.state: dict[str, Tensor] = {}
        for name, p in self.params.items():
            if p.ndim == 2 and "embed" not in name:
                self.matrices[p.shape].append(name)
                self.state[f"m.{name}"] = torch.zeros_like(p)
            else:
                self.rest.append(name)
                self.state[f"m.{name}"] = torch.zeros_like(p)
                self.state[f"v.{name}"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update; ``scale`` is the schedule's multiplier for both learning rates."""
        self.count += 1
        for shape, names in self.matrices.items():
            self._muon(shape, names, self.lr_matrix * scale)
        for name in self.rest:
            self._adam(name, self.lr_rest * scale)

    def _muon(self, shape: torch.Size, names: list[str], lr: float) -> None:
        grads = []
        for name in names:
            g, m = self.params[name].grad, self.state[f"m.{name}"]
            m.lerp_(g, 1 - self.momentum)
            grads.append(g.lerp(m, self.momentum))
        updates = orthogonalise(torch.stack(grads).to(self.dtype)).float()
        lr_shape = lr * max(1.0, shape[0] / shape[1]) ** 0.5
        for name, update in zip(names, updates, strict=True):
            p = self.params[name]
            p.mul_(1 - lr * self.decay).add_(update, alpha=-lr_shape)

    def _adam(self, name: str, lr: float) -> None:
        p, (b1, b2) = self.params[name], self.betas
        m, v = self.state[f"m.{name}"], self.state[f"v.{name}"]
        m.lerp_(p.grad, 1 - b1)
        v.lerp_(p.grad.square(), 1 - b2)
        m_hat, v_hat = m / (1 - b1**self.count), v / (1 - b2**self.count)
        p.addcdiv_(m_hat, v_hat.sqrt().add_(self.eps), value=-lr)

    def zero_grad(self) -> None:
        for p in self.params.values():
            p.grad = None
