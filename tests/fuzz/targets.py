"""Readers of bytes that others write (files, requests, streams), each with inputs to start from.

A reader either succeeds or raises RidgelineError with one sentence; anything else is a fault.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.sources import read_config
from ridgeline.engine.checkpoints.safetensors import entries_of, read_header
from ridgeline.engine.generation_config import read_sampling_defaults
from ridgeline.engine.tokenization.chat import Chat, JinjaTemplate
from ridgeline.engine.tokenization.tokenizer import load_tokenizer
from ridgeline.errors import UserError
from ridgeline.fleet.ray.fleet_file import read_fleet_file
from ridgeline.hardware.catalogue import load_catalogue, load_device_prices
from ridgeline.measure.results.event_log import read_log
from ridgeline.measure.results.readers import read_result
from ridgeline.measure.workload.jsonl import read_workload
from ridgeline.measure.workload.traces import azure, burstgpt, mooncake
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.families.shapes import shape_config, shape_table
from ridgeline.plan.calibration.calibration import load_calibration
from ridgeline.plan.calibration.remote_server import load_server_times
from ridgeline.plan.cost.api_prices import load_prices
from ridgeline.serve.auth.keys import load_keys
from ridgeline.workflows.optimize.optimize import ladder_of
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_text
from tests.fuzz.wire_targets import (
    mutate_request,
    mutate_stream,
    read_request,
    read_stream,
    request_seeds,
    stream_seeds,
)

Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """`read` gets an empty folder and the bytes; it writes the file and reads it.

    `in_memory`: it writes none, so that no folder is made for each input.
    """

    read: Callable[[Path, bytes], object]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate = mutate_bytes
    in_memory: bool = False


def _json_or_bytes(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    return dump(mutate_json(rng, json.loads(data)))


def _text_or_bytes(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    return mutate_text(rng, data.decode()).encode("utf-8", "surrogatepass")


def dump(value: Any) -> bytes:
    """JSON as `json` writes it, with NaN and lone surrogates as they are in Python."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    def run(folder: Path, data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return run


# model directories

DEMO = model_path("demo")


def _with_demo(folder: Path, *, without: str) -> None:
    for file in DEMO.iterdir():
        if file.name != without and file.suffix == ".json":
            (folder / file.name).symlink_to(file)


def _read_config(folder: Path, data: bytes) -> None:
    _with_demo(folder, without="config.json")
    (folder / "config.json").write_bytes(data)
    load_spec(str(folder))
    load_planning_spec(str(folder))


def _configs() -> list[bytes]:
    demo = json.loads((DEMO / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    moe = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    more = [
        {"rope_scaling": rope},
        {"quantization_config": awq},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        {**moe, "num_experts_per_tok": 2, "sliding_window": 64},
    ]
    plain = [demo | extra | {"torch_dtype": "float32"} for extra in [{}, *more]]
    return [dump(config) for config in [*plain, *_one_of_each_family()]]


def _one_of_each_family() -> list[dict[str, Any]]:
    """Published configs, the first of each `model_type`."""
    found: dict[str, dict[str, Any]] = {}
    for name in shape_table():
        config = shape_config(name)
        found.setdefault(config["model_type"], config)
    return list(found.values())


def _read_generation_config(folder: Path, data: bytes) -> None:
    _with_demo(folder, without="generation_config.json")
    (folder / "generation_config.json").write_bytes(data)
    load_spec(str(folder))
    read_sampling_defaults(str(folder))


def _read_tokenizer(folder: Path, data: bytes) -> None:
    _with_demo(folder, without="tokenizer.json")
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = load_tokenizer(str(folder))
    tokens = tokenizer.encode("def f(x): return x + 1")
    tokenizer.decode(tokens)
    detokenizer = tokenizer.detokenizer(tokens)
    for token in [*tokens[:5], 0, 3]:
        detokenizer.push(token)


@cache
def _tokenizers() -> list[bytes]:
    whole = json.loads((DEMO / "tokenizer.json").read_text())
    vocab = dict(list(whole["model"]["vocab"].items())[:300])
    merges = [
        pair
        for pair in whole["model"]["merges"]
        if "".join(pair if isinstance(pair, list) else pair.split(" ")) in vocab
    ]
    whole["model"] |= {"vocab": vocab, "merges": merges[:30]}
    words = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    return [dump(whole), dump({**whole, "model": words}), dump({**whole, "model": unigram})]


def _read_tokenizer_config(folder: Path, data: bytes) -> None:
    _with_demo(folder, without="tokenizer_config.json")
    (folder / "tokenizer_config.json").write_bytes(data)
    load_spec(str(folder))
    load_tokenizer(str(folder))


def _tokenizer_configs() -> list[bytes]:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    config = {"eos_token": {"content": "<|endoftext|>", "special": True}, "add_bos_token": False}
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "x"}]
    return [dump(config | {"chat_template": value}) for value in (template, named)]


TEMPLATES = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- endif -%}"
    "{% set ns = namespace(n=0) %}{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}"
    "{{ '%d %s' % (ns.n, m.content) }}{% endfor %}{{ tools | tojson if tools else '' }}",
    "{% macro show(m) %}{{ m.content ~ eos_token }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{{ raise_exception('no') if loop.index > 3 }}{% endfor %}",
)


def _render(folder: Path, data: bytes) -> None:
    """As the process that renders does, which bounds time and memory."""
    try:
        source = data.decode()
    except UnicodeDecodeError:
        return
    template = JinjaTemplate({"default": source}, {"eos_token": "</s>"})
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]
    template.render(Chat(messages, True, None, {}, False))


def _safetensors(header: object, data: bytes = b"\0" * 64) -> bytes:
    text = dump(header)
    return len(text).to_bytes(8, "little") + text + data


def _mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    size = int.from_bytes(data[:8], "little")
    return _safetensors(mutate_json(rng, json.loads(data[8 : 8 + size])), data[8 + size :])


def _read_safetensors(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    read_header(folder / "model.safetensors")
    entries_of(folder)


def _read_index(folder: Path, data: bytes) -> None:
    (folder / "a.safetensors").write_bytes(_safetensors(HEADER))
    (folder / "model.safetensors.index.json").write_bytes(data)
    entries_of(folder)


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
}


# GGUF

_KINDS = {"u8": 0, "u32": 4, "f32": 6, "bool": 7, "str": 8, "arr": 9, "u64": 10}


def _gguf_text(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw


def gguf_file(metadata: list[tuple[str, bytes]], tensors: int = 1) -> bytes:
    """A file with one small tensor; values are already in bytes, with their type."""
    out = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(metadata))
    out += b"".join(_gguf_text(key) + value for key, value in metadata)
    for index in range(tensors):
        out += _gguf_text(f"t{index}") + struct.pack("<IQQIQ", 2, 32, 1, 0, 0)
    return out + b"\0" * (-len(out) % 32) + b"\0" * 128


def gguf_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _gguf_text(value)
    inner = [gguf_value(item) for item in value]
    kind = inner[0][:4] if inner else struct.pack("<I", 8)
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(inner))
        + b"".join(item[4:] for item in inner)
    )


def _ggufs() -> list[bytes]:
    base = {
        "general.architecture": "llama", "general.alignment": 32, "llama.block_count": 1,
        "llama.embedding_length": 32, "llama.attention.head_count": 1, "llama.context_length": 64,
        "llama.feed_forward_length": 64, "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    sentencepiece = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1], "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    pairs = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<eos>"], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.chat_template": TEMPLATES[0],
    }  # fmt: skip
    return [
        gguf_file([(key, gguf_value(value)) for key, value in (base | more).items()])
        for more in (sentencepiece, pairs)
    ]


def _mutate_gguf(rng: random.Random, data: bytes) -> bytes:
    """Bytes, or a metadata value of another type in a file that is otherwise right."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, data)
    key = rng.choice(
        (
            "general.alignment",
            "general.architecture",
            "llama.block_count",
            "split.count",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.scores",
            "tokenizer.ggml.merges",
            "tokenizer.ggml.token_type",
            "tokenizer.ggml.bos_token_id",
            "tokenizer.chat_template",
            "tokenizer.ggml.model",
            "llama.attention.head_count",
            "llama.rope.freq_base",
            "llama.embedding_length",
            "llama.context_length",
        )
    )
    values = ("abc", "", -1, 0, 2**40, float("inf"), float("nan"), True, [1, 2], ["a", "b"], [[1]],
              "x" * 3000, [], ["a " * 20], [-1, -1], 1.5)  # fmt: skip
    head, count = data[:16], int.from_bytes(data[16:24], "little")
    extra = _gguf_text(key) + gguf_value(rng.choice(values))
    # The later of two keys of one name wins; the new one goes last by going in twice.
    body = data[24:]
    at = body.find(_gguf_text("t0"))
    return head + ((count + 1) % 2**64).to_bytes(8, "little") + body[:at] + extra + body[at:]


def _read_gguf_file(path: Path) -> None:
    load_spec(str(path))
    tokenizer = load_tokenizer(str(path))
    tokenizer.encode("ab ba")


# configuration, ladders, records

TOML = b"""[engine]
model = "demo"
max_num_seqs = 8
kv_cache_memory_bytes = "512MiB"
[server]
port = 8000
slo_classes = ["chat:ttft=200ms,tpot=50ms"]
"""
LADDER = b"""[weights]
risk = 0.5
[[rung]]
id = "int8"
title = "INT8 weights"
lossy = true
needs = ["device == 'cpu'"]
[rung.settings]
quantization = "int8"
"""
KEYS = b'[[keys]]\nname = "a"\nsha256 = "' + b"0" * 64 + b'"\nrequests_per_minute = 5\n'


def _ladders() -> list[bytes]:
    from importlib.resources import files

    shipped = files("ridgeline.optimize").joinpath("ladder.toml").read_bytes()
    return [LADDER, shipped[:4000].rpartition(b"[[rung]]")[0]]


def _event_logs() -> list[bytes]:
    from ridgeline.measure.results import event_log
    from ridgeline.records import RunTrace

    fields = {
        field.name: _default_of(field)
        for field in msgspec.structs.fields(RunTrace)
        if field.required
    }
    run = msgspec.convert(fields, RunTrace, strict=False)
    header = msgspec.json.encode(event_log._header(run, None))
    return [header + b"\n"]


def _default_of(field: Any) -> Any:
    for value in ([], {}, 1.0, 1, "x", True, None):
        try:
            return msgspec.convert(value, field.type)
        except msgspec.ValidationError:
            continue
    raise AssertionError(field)


RESULT = {
    "date": "20260101-000000", "backend": "vllm", "duration": 10.0, "completed": 2,
    "total_output_tokens": 20, "request_throughput": 0.2, "mean_ttft_ms": 5.0,
    "ttfts": [0.1, 0.2], "itls": [[0.01], [0.02]], "output_lens": [2, 2], "errors": ["", ""],
}  # fmt: skip
WORKLOAD = (
    b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}]}}\n'
    b'{"prompt": [1, 2, 3], "max_tokens": 5}\n'
)


FLEET = b"""host = "0.0.0.0"
port = 8080
route = ["--policy", "prefix-aware"]
stock = "h100-sxm=2,l4=4"
[[models]]
model = "demo"
replicas = 2
max_replicas = 6
target_in_flight = 8
serve = ["--max-num-seqs", "8"]
resources = { rack = 1 }
[[models]]
model = "llama-3.1-8b"
rate = 4.0
input_len = 2048
quantization = "fp8"
"""
TRACES = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,x\n",
    b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n',
)
PRICES = b"""[[price]]
device = "h100-sxm"
provider = "a cloud"
commitment = "on demand"
usd_per_hour = 3.0
source = "a price list"
as_of = "2026-11-01"
"""


def _read_trace(path: Path) -> None:
    for read in (azure, burstgpt, mooncake):
        with suppress(UserError):
            read(str(path))


def _read_tables(path: Path) -> None:
    """Of devices, of their prices, and of those of providers."""
    text = path.read_bytes().decode("utf-8", "replace")
    for read in (load_device_prices, load_prices, load_catalogue):
        with suppress(UserError):
            read(text)


def _tables() -> list[bytes]:
    from importlib.resources import files

    names = ("hardware/catalogue.toml", "plan/cost/api_prices.toml")
    shipped = [files("ridgeline").joinpath(name).read_bytes() for name in names]
    return [PRICES, *(data[:6000].rpartition(b"\n[[")[0] for data in shipped)]


def _lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = _json_or_bytes(rng, lines[at])
    return b"\n".join(lines)


TARGETS: dict[str, Target] = {
    "config_json": Target(_read_config, _configs, _json_or_bytes),
    "generation_config": Target(
        _read_generation_config,
        lambda: [dump({"eos_token_id": [0, 1], "temperature": 0.5, "top_k": 5, "do_sample": True})],
        _json_or_bytes,
    ),
    "tokenizer_json": Target(_read_tokenizer, _tokenizers, _json_or_bytes),
    "tokenizer_config": Target(_read_tokenizer_config, _tokenizer_configs, _json_or_bytes),
    "chat_template": Target(
        _render, lambda: [t.encode() for t in TEMPLATES], _text_or_bytes, in_memory=True
    ),
    "safetensors": Target(_read_safetensors, lambda: [_safetensors(HEADER)], _mutate_safetensors),
    "safetensors_index": Target(
        _read_index,
        lambda: [
            dump({"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "a.safetensors"}})
        ],
        _json_or_bytes,
    ),
    "gguf": Target(_file("m.gguf", _read_gguf_file), _ggufs, _mutate_gguf),
    "ridgeline_toml": Target(_file("r.toml", read_config), lambda: [TOML], _text_or_bytes),
    "ladder_toml": Target(_file("l.toml", ladder_of), _ladders, _text_or_bytes),
    "api_keys": Target(
        _file("k.toml", lambda path: load_keys(None, str(path))), lambda: [KEYS], _text_or_bytes
    ),
    "event_log": Target(_file("run.jsonl", read_log), _event_logs, _lines),
    "result": Target(_file("r.json", read_result), lambda: [dump(RESULT)], _json_or_bytes),
    "workload": Target(_file("w.jsonl", read_workload), lambda: [WORKLOAD], _lines),
    "calibration": Target(
        _file("c.json", load_calibration), lambda: [dump({"version": 1})], _json_or_bytes
    ),
    "server_calibration": Target(
        _file("c.json", load_server_times), lambda: [dump({"version": 1})], _json_or_bytes
    ),
    "fleet_toml": Target(_file("f.toml", read_fleet_file), lambda: [FLEET], _text_or_bytes),
    "trace": Target(_file("t", _read_trace), lambda: [*TRACES], _text_or_bytes),
    "tables": Target(_file("t.toml", _read_tables), _tables, _text_or_bytes),
    "request": Target(read_request, request_seeds, mutate_request, in_memory=True),
    "sse": Target(read_stream, stream_seeds, mutate_stream, in_memory=True),
}
