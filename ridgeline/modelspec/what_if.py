"""Edit the shape of a spec in a few words, and compare the KV cache it then needs.

    kv_heads=1 window=1024 share=2

Each key is one published way to a smaller cache: fewer KV heads (multi-query attention, Shazeer
2019, arXiv 1911.02150), sliding windows in most layers (Gemma 3 has one layer in six that sees
everything), one cache for neighbouring layers (cross-layer attention, Brandon et al. 2024, arXiv
2405.12981), one latent row per token in place of keys and values (MLA, arXiv 2405.04434), and
fewer bytes per number. Further keys change what a step reads and multiplies, for predictions:
fewer layers or feed-forward channels (structured pruning, a distilled student), other numbers of
experts per token, attention in place of states of a fixed size, a separate table for the LM head.
Only shapes change: a model has to be trained in the new form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadInput
from ridgeline.modelspec.cost.kv_cache import layer_kv_bytes
from ridgeline.modelspec.format import BYTES_OF_KV
from ridgeline.modelspec.model import AttentionSpec, LatentSpec, LayerSpec, LinearSpec, ModelSpec

GLOBAL_EVERY = 6
LATENT_ROPE_DIM = 64
CONTEXT = 32_768

Edit = Callable[[ModelSpec, int], ModelSpec]


class KvKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that cache alike: their bytes per token while no window is full, and at a context."""

    kind: str
    num_layers: int
    bytes_per_token: int
    bytes_at_context: int


class KvEffect(NamedTuple):
    """How many times smaller the cache at the context is with one of the edits alone."""

    edit: str
    times: float


class KvComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one sequence of `context` tokens before and after the edits.

    `times` is how many times smaller it has become; `effects` have the same for each edit alone.
    """

    model: str
    edits: str
    context: int
    before: tuple[KvKind, ...]
    after: tuple[KvKind, ...]
    times: float
    effects: tuple[KvEffect, ...]


def compare_kv(spec: ModelSpec, edits: str) -> KvComparison:
    """The KV cache of `spec` and of the same model with `edits`.

    Raises BadInput with the known keys, or with what a value must be.
    """
    chosen = parse_edits(edits)
    context = chosen.pop("context", min(CONTEXT, spec.max_positions))
    before = kv_kinds(spec, int(context))

    def times(edited: ModelSpec) -> float:
        return _total(before) / _total(kv_kinds(edited, int(context)))

    edited = apply_edits(spec, chosen)
    alone = {key: value for key, value in chosen.items() if key not in ("global_every",)}
    every = {"global_every": chosen["global_every"]} if "global_every" in chosen else {}
    effects = tuple(
        KvEffect(
            f"{key}={value}",
            times(apply_edits(spec, {key: value, **(every if key == "window" else {})})),
        )
        for key, value in alone.items()
    )
    return KvComparison(
        model=spec.name,
        edits=edits,
        context=int(context),
        before=before,
        after=kv_kinds(edited, int(context)),
        times=times(edited),
        effects=effects,
    )


def edited_spec(spec: ModelSpec, edits: str) -> ModelSpec:
    """The spec with edits that are written as `key=value`, for a prediction.

    Raises BadInput, also for keys that belong to the comparison of caches.
    """
    chosen = parse_edits(edits)
    for key, flag in (
        ("context", "--input-len and --output-len"),
        ("kv_dtype", "--kv-cache-dtype"),
    ):
        if key in chosen:
            raise BadInput(
                f"--what-if: {key} is no part of the model's shape here",
                value=f"{key}={chosen[key]}",
                fix=f"give it as {flag}",
            )
    return apply_edits(spec, chosen)


def parse_edits(text: str) -> dict[str, int | str]:
    """The edits by key, as `key=value` separated by spaces or commas."""
    chosen: dict[str, int | str] = {}
    for part in text.replace(",", " ").split():
        key, equals, value = part.partition("=")
        if key not in KEYS:
            raise BadInput(
                "--what-if has an unknown key", value=part, limit=f"known: {', '.join(KEYS)}"
            )
        if key in chosen:
            raise BadInput("--what-if names a key twice", value=key, fix="give it one value")
        if key == "kv_dtype":
            if value not in BYTES_OF_KV:
                raise BadInput(
                    "--what-if: kv_dtype is unknown", value=value, limit=", ".join(BYTES_OF_KV)
                )
            chosen[key] = value
        elif not equals or not value.isdecimal() or int(value) < 1:
            raise BadInput(
                f"--what-if: {key} must be a whole number of at least 1",
                value=part,
                fix=f"write {key}=N: {KEYS[key]}",
            )
        else:
            chosen[key] = int(value)
    if not chosen.keys() - {"context"}:
        raise BadInput("--what-if changes nothing", value=text, fix=f"set one of {', '.join(KEYS)}")
    if "global_every" in chosen and "window" not in chosen:
        raise BadInput(
            "--what-if: global_every has no effect without window",
            value=f"global_every={chosen['global_every']}",
            fix="add window=N",
        )
    return chosen


def apply_edits(spec: ModelSpec, edits: Mapping[str, int | str]) -> ModelSpec:
    """The spec with the edits, in the order of `KEYS`."""
    if not any(_caches(layer) for layer in spec.layers):
        raise BadInput("--what-if: no layer of the model has a KV cache", value=spec.name)
    for key in KEYS:
        if key not in edits or key in ("global_every", "context"):
            continue
        value = edits[key]
        if key == "kv_dtype":
            spec = replace(spec, kv_dtype=str(value))
        elif key == "window":
            spec = _with_window(spec, int(value), int(edits.get("global_every", GLOBAL_EVERY)))
        else:
            spec = _EDITS[key](spec, int(value))
    return spec


def kv_kinds(spec: ModelSpec, context: int) -> tuple[KvKind, ...]:
    """The layers of each kind of cache, in the order in which the kinds first occur."""
    rows: dict[str, KvKind] = {}
    for layer in spec.layers:
        attention = layer.attention
        kind, per_token, kept = _kind(attention), 0, 0
        if _caches(layer):
            per_token = layer_kv_bytes(attention, spec.kv_dtype)
            kept = min(context, attention.window or attention.chunk or context)
        row = rows.get(kind, KvKind(kind=kind, num_layers=0, bytes_per_token=0, bytes_at_context=0))
        rows[kind] = KvKind(
            kind=kind,
            num_layers=row.num_layers + 1,
            bytes_per_token=row.bytes_per_token + per_token,
            bytes_at_context=row.bytes_at_context + kept * per_token,
        )
    return tuple(rows.values())


def _kind(attention: AttentionSpec) -> str:
    if attention.delta is not None:
        return "state of a fixed size, no cache"
    if attention.shares_kv:
        return "shared: reads an earlier layer's"
    if attention.latent is not None:
        return f"latent of {attention.latent.rank} + {attention.latent.rope_dim}"
    heads = f"{attention.num_kv_heads} KV x {attention.head_dim}"
    if attention.window is not None:
        return f"window of {attention.window:,}, {heads}"
    if attention.chunk is not None:
        return f"chunks of {attention.chunk:,}, {heads}"
    return f"full, {heads}"


def _caches(layer: LayerSpec) -> bool:
    return layer.attention.delta is None and not layer.attention.shares_kv


def _total(kinds: tuple[KvKind, ...]) -> int:
    return sum(kind.bytes_at_context for kind in kinds)


def _with_attention(
    spec: ModelSpec, edit: Callable[[int, AttentionSpec], AttentionSpec]
) -> ModelSpec:
    """Edit the layers that attend."""
    layers = [
        layer if layer.attention.delta is not None
        else replace(layer, attention=edit(i, layer.attention))
        for i, layer in enumerate(spec.layers)
    ]  # fmt: skip
    return replace(spec, layers=tuple(layers))


def _with_latent(spec: ModelSpec, rank: int) -> ModelSpec:
    def edit(_: int, attention: AttentionSpec) -> AttentionSpec:
        if attention.latent is not None:
            down = replace(attention.latent.kv_down, num_out=rank + attention.latent.rope_dim)
            return replace(attention, latent=replace(attention.latent, rank=rank, kv_down=down))
        down = LinearSpec(
            num_out=rank + LATENT_ROPE_DIM, num_in=spec.hidden_size, format=attention.k.format
        )
        up = attention.num_heads * attention.head_dim
        return replace(
            attention,
            num_kv_heads=1,
            k=replace(attention.k, num_out=up, num_in=rank),
            v=replace(attention.v, num_out=up, num_in=rank),
            latent=LatentSpec(rank=rank, rope_dim=LATENT_ROPE_DIM, kv_down=down),
        )

    return _with_attention(spec, edit)


def _with_kv_heads(spec: ModelSpec, num_kv_heads: int) -> ModelSpec:
    def edit(i: int, attention: AttentionSpec) -> AttentionSpec:
        if attention.latent is not None:
            raise BadInput(
                "--what-if: kv_heads has no effect on a cache of latent rows",
                value=f"kv_heads={num_kv_heads}",
                fix="leave kv_heads or latent out",
            )
        if attention.num_heads % num_kv_heads:
            raise BadInput(
                f"--what-if: kv_heads must divide the {attention.num_heads} heads of layer {i}",
                value=f"kv_heads={num_kv_heads}",
            )
        rows = num_kv_heads * attention.head_dim
        return replace(
            attention,
            num_kv_heads=num_kv_heads,
            k=replace(attention.k, num_out=rows),
            v=replace(attention.v, num_out=rows),
        )

    return _with_attention(spec, edit)


def _with_window(spec: ModelSpec, window: int, global_every: int) -> ModelSpec:
    """Layers that have a window get another one; where none has, all but every Nth get it."""
    has_windows = any(layer.attention.window or layer.attention.chunk for layer in spec.layers)

    def edit(i: int, attention: AttentionSpec) -> AttentionSpec:
        sees_all = attention.window is None and attention.chunk is None
        if sees_all if has_windows else i % global_every == global_every - 1:
            return attention
        return replace(attention, window=window, chunk=None)

    return _with_attention(spec, edit)


def _shape(attention: AttentionSpec) -> tuple[int, int, int | None]:
    """What layers that share a cache have in common."""
    return attention.num_kv_heads, attention.head_dim, attention.window


def _with_sharing(spec: ModelSpec, share: int) -> ModelSpec:
    """Of every `share` successive layers with equal shapes and windows one keeps a cache."""
    shapes = Counter(_shape(layer.attention) for layer in spec.layers if _caches(layer))
    if share > (most := max(shapes.values())):
        raise BadInput(
            "--what-if: share is more than the layers of one kind",
            value=f"share={share}",
            limit=f"at most {most}, as one cache then serves all of them",
        )
    count: dict[tuple[int, int, int | None], int] = {}

    def edit(_: int, attention: AttentionSpec) -> AttentionSpec:
        key = _shape(attention)
        place = count[key] = count.get(key, -1) + 1
        return replace(attention, shares_kv=attention.shares_kv or place % share > 0)

    return _with_attention(spec, edit)


def _with_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """As many of the layers, of each kind its share, spread evenly."""
    total = len(spec.layers)
    if num_layers > total:
        raise BadInput(
            "--what-if: layers is more than the model has",
            value=f"layers={num_layers}",
            limit=f"at most {total}",
        )
    places: dict[LayerSpec, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        places.setdefault(layer, []).append(i)
    shares = {layer: len(own) * num_layers / total for layer, own in places.items()}
    counts = {layer: int(share) for layer, share in shares.items()}
    for layer in sorted(shares, key=lambda each: counts[each] - shares[each]):
        counts[layer] += sum(counts.values()) < num_layers
    kept = [own[i * len(own) // counts[k]] for k, own in places.items() for i in range(counts[k])]
    return replace(spec, layers=tuple(spec.layers[i] for i in sorted(kept)))


def _with_channels(spec: ModelSpec, channels: int) -> ModelSpec:
    """Feed-forward layers, or each expert, with as many channels."""

    def edit(layer: LayerSpec) -> LayerSpec:
        mlp = layer.mlp
        return replace(
            layer,
            mlp=replace(
                mlp,
                gate=replace(mlp.gate, num_out=channels),
                up=replace(mlp.up, num_out=channels),
                down=replace(mlp.down, num_in=channels),
            ),
        )

    return replace(spec, layers=tuple(edit(layer) for layer in spec.layers))


def _with_experts_per_token(spec: ModelSpec, count: int) -> ModelSpec:
    most = max(layer.mlp.num_experts for layer in spec.layers)
    if count > most:
        raise BadInput(
            "--what-if: experts_per_token is more than a layer has",
            value=f"experts_per_token={count}",
            limit=f"at most {most}" if most else "a model with routed experts",
        )
    layers = [
        replace(layer, mlp=replace(layer.mlp, experts_per_token=count))
        if layer.mlp.num_experts
        else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def _with_attention_every(spec: ModelSpec, every: int) -> ModelSpec:
    """In a model with states: one layer in `every` attends, as its first attending layer does."""
    states = next((each.attention for each in spec.layers if each.attention.delta), None)
    attends = next((each.attention for each in spec.layers if not each.attention.delta), None)
    if states is None or attends is None:
        raise BadInput(
            "--what-if: attention_every needs a model with layers of both kinds, states and "
            "attention",
            value=f"attention_every={every}",
        )
    layers = [
        replace(layer, attention=attends if i % every == every - 1 else states)
        for i, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


def _with_own_head(spec: ModelSpec, _: int) -> ModelSpec:
    if not spec.tied_embeddings:
        raise BadInput("--what-if: the LM head has a separate table already", value=spec.name)
    return replace(spec, tied_embeddings=False)


KEYS: Mapping[str, str] = {
    "layers": "layers that are kept, of each kind its share",
    "channels": "channels of each feed-forward layer or expert",
    "experts_per_token": "experts that a token passes through",
    "attention_every": "one layer in N attends, the others keep a state; 1: all attend",
    "own_head": "1: the LM head has a table apart from the embeddings, as after a rotation",
    "latent": f"numbers of the row that MLA caches, next to {LATENT_ROPE_DIM} rotated ones",
    "kv_heads": "KV heads of every layer; 1 is multi-query attention",
    "window": "keys that a windowed layer sees",
    "global_every": f"with window: one layer in N sees everything ({GLOBAL_EVERY})",
    "share": "successive layers of a kind that use one cache",
    "kv_dtype": "format of the cache",
    "context": "tokens of the sequence",
}  # fmt: skip
"""The keys and what their values mean."""

_EDITS: Mapping[str, Edit] = {
    "layers": _with_layers,
    "channels": _with_channels,
    "experts_per_token": _with_experts_per_token,
    "attention_every": _with_attention_every,
    "own_head": _with_own_head,
    "latent": _with_latent,
    "kv_heads": _with_kv_heads,
    "share": _with_sharing,
}
