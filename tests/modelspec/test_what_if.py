"""The KV cache of an edited model, by kind of layer."""

from __future__ import annotations

import pytest

from ridgeline.cli.main import main
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import kv_bytes
from ridgeline.modelspec.what_if import apply_edits, compare_kv, kv_kinds, parse_edits

LLAMA = "dummy:llama-3.1-8b"  # 32 layers of 8 KV heads of 128, in bfloat16


def test_each_edit_divides_the_cache_by_what_it_saves() -> None:
    spec = load_spec(LLAMA)
    found = compare_kv(spec, "kv_heads=1 window=1024 share=2 context=32768")
    effects = dict(found.effects)
    assert effects["kv_heads=1"] == 8
    assert effects["share=2"] == 2
    kept = (5 + 27 * 1024 / 32768) / 32  # layers 5, 11, 17, 23 and 29 see everything
    assert effects["window=1024"] == pytest.approx(1 / kept)
    assert found.times > 20


def test_totals_are_those_of_the_cost_model() -> None:
    spec = load_spec(LLAMA)
    edited = apply_edits(spec, parse_edits("window=512,share=3,kv_heads=2,kv_dtype=int8"))
    for each in (spec, edited):
        for context in (100, 5000):
            total = sum(kind.bytes_at_context for kind in kv_kinds(each, context))
            assert total == kv_bytes(each, context)


def test_shared_layers_read_an_earlier_layer_of_their_kind() -> None:
    edited = apply_edits(load_spec(LLAMA), {"window": 1024, "share": 2})
    shared = [i for i, layer in enumerate(edited.layers) if layer.attention.shares_kv]
    own = [i for i in range(32) if i not in shared]
    for i in shared:
        window = edited.layers[i].attention.window
        assert any(j < i and edited.layers[j].attention.window == window for j in own)


def test_a_latent_row_replaces_keys_and_values() -> None:
    found = compare_kv(load_spec(LLAMA), "latent=512 context=1000")
    assert [kind.kind for kind in found.after] == ["latent of 512 + 64"]
    assert found.after[0].bytes_per_token == 32 * 2 * (512 + 64)


def test_windows_of_a_model_that_has_them_are_resized() -> None:
    spec = load_spec("dummy:gemma-3-1b")
    windows = [layer.attention.window for layer in spec.layers]
    edited = apply_edits(spec, {"window": 128})
    assert [layer.attention.window for layer in edited.layers] == [
        None if window is None else 128 for window in windows
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kvheads=1", "unknown key; got 'kvheads=1'"),
        ("kv_heads=0", "kv_heads must be a whole number of at least 1"),
        ("kv_heads=two", "kv_heads must be a whole number of at least 1"),
        ("window", "window must be a whole number of at least 1"),
        ("share=2 share=3", "names a key twice"),
        ("kv_dtype=int3", "kv_dtype is unknown"),
        ("global_every=4", "global_every has no effect without window"),
        ("context=100", "changes nothing"),
        ("", "changes nothing"),
    ],
)
def test_bad_keys_and_values_are_named(text: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason.replace("(", r"\(")):
        parse_edits(text)


def test_edits_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(BadInput, match="kv_heads must divide the 32 heads of layer 0"):
        compare_kv(load_spec(LLAMA), "kv_heads=5")
    with pytest.raises(BadInput, match="no effect on a cache of latent rows"):
        compare_kv(load_spec(LLAMA), "latent=512 kv_heads=1")
    with pytest.raises(BadInput, match="got 'share=33'; limit: at most 32"):
        compare_kv(load_spec(LLAMA), "share=33")
    assert compare_kv(load_spec(LLAMA), "share=32").times == 32


def test_inspect_prints_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", LLAMA, "--what-if", "kv_heads=1 window=1024 share=2"]) == 0
    out = capsys.readouterr().out
    assert "window of 1,024, 1 KV x 128" in out
    assert "74.5 times smaller" in out
    assert "each alone: kv_heads=1 8.0, window=1024 5.5, share=2 2.0" in out
