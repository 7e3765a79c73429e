"""The tokenizer and chat templates of a model directory as the metadata of a GGUF file.

A tokenizer is written only if the reader of this package, which gives llama.cpp's token ids, splits
and encodes a set of probe texts exactly as the original does; otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.engine.tokenization.gguf import split_steps, tokenizer_of
from ridgeline.engine.tokenization.gguf_patterns import PRE_TOKENIZERS
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.gguf_tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    end_of_generation,
)
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.model import ModelSpec

if TYPE_CHECKING:
    import tokenizers

_PROBES = (
    "Hello, world! It's 3.14159 or 1234567890; they'll, I'D, we'VE (don't) [x]={y}...",
    "def f(x):\n    return x+1  # naïve café\n\n\n\tif  a:\r\n   pass   \n ",
    "MixedCase camelCase HTTPServer ÉCOLE straße ǅ ʰ",
    "中文字符和日本語カタカナひらがな 한국어 ไทย हिन्दी العربية עברית",
    "🙂👩‍👩‍👧 ½ ² Ⅻ ٣٤ €5 $x_y $$ --- ««» “quoted” ‘s ’t",
    " leading", "trailing ", "a  b   c", "\n", "x\n\ny", "  ", "",
)  # fmt: skip
_FIX = "use --format ridgeline"


def tokenizer_metadata(source: Path, spec: ModelSpec) -> dict[str, Any]:
    """Every `tokenizer.*` key for a model directory; one without tokenizer.json takes token ids.

    Raises CannotRun for a tokenizer that GGUF cannot express.
    """
    file = source / "tokenizer.json"
    if not file.is_file():
        return _no_tokenizer(spec)
    import tokenizers

    document = read_json(file)
    original = tokenizers.Tokenizer.from_file(str(file))
    original.no_truncation()
    original.no_padding()
    model = document.get("model", {})
    if model.get("type") != "BPE":
        raise _refusal(f"of type {model.get('type')}; GGUF is written with BPE")
    tokens, types = _tokens(document, spec.vocab_size)
    pieces = bool(model.get("byte_fallback"))
    start = _sentence_piece(document, tokens) if pieces else _byte_pairs(document, original)
    found = {**start, PREFIX + "tokens": tokens, PREFIX + "token_type": types}
    found |= _special(source, document, original, spec)
    _check_ends(found, spec)
    _check_encoding(found, original)
    return found | _templates(source)


def _no_tokenizer(spec: ModelSpec) -> dict[str, Any]:
    """llama.cpp's word for none, and the tokens that begin and end a text."""
    ids = {"bos": spec.bos_token_id}
    ids |= dict(zip(("eos", "eot", "eom"), spec.eos_token_ids, strict=False))
    return {
        PREFIX + "model": "none",
        **{f"{PREFIX}{role}_token_id": id for role, id in ids.items() if id is not None},
    }


def _byte_pairs(document: Mapping[str, Any], original: tokenizers.Tokenizer) -> dict[str, Any]:
    model = document["model"]
    normalizer = (document.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):  # llama.cpp leaves NFC out, as its converter does
        raise _refusal(f"with the normalizer {normalizer}")
    if original.pre_tokenizer is None:
        raise _refusal("without a pre-tokenizer")
    name = _pre_tokenizer_name(original, ignores_merges=bool(model.get("ignore_merges")))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {PREFIX + "model": "gpt2", PREFIX + "pre": name, PREFIX + "merges": merges}


def _pre_tokenizer_name(original: tokenizers.Tokenizer, *, ignores_merges: bool) -> str:
    """llama.cpp's name of a pre-tokenizer that splits the probes as the original does."""
    wanted = [original.pre_tokenizer.pre_tokenize_str(text) for text in _PROBES]
    for name, words in PRE_TOKENIZERS.items():
        if words.byte_level and words.ignore_merges == ignores_merges:
            steps = split_steps(words)
            if [steps.pre_tokenize_str(text) for text in _PROBES] == wanted:
                return name
    raise _refusal("that splits words as no pre-tokenizer of llama.cpp does")


def _sentence_piece(document: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Scores that make llama.cpp merge in the order of the merges."""
    scores = [0.0] * len(tokens)
    ids: dict[str, int] = document["model"]["vocab"]
    for rank, merge in enumerate(document["model"]["merges"]):
        a, b = merge.split(" ", 1) if isinstance(merge, str) else merge
        token = ids[a + b]
        if scores[token] == 0.0:
            scores[token] = -float(rank + 1)
    last = -float(len(document["model"]["merges"]) + 1)
    for token in ids.values():
        if scores[token] == 0.0:
            scores[token] = last
    prefix = "Prepend" in str(document.get("normalizer")) or "Metaspace" in str(
        document.get("pre_tokenizer")
    )
    return {
        PREFIX + "model": "llama",
        PREFIX + "pre": "default",
        PREFIX + "scores": scores,
        PREFIX + "add_space_prefix": prefix,
    }


def _tokens(document: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens by id, and their types."""
    model = document["model"]
    by_id = {at: token for token, at in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    if model.get("byte_fallback"):
        kinds |= {model["vocab"][name]: BYTE for name in _byte_names() if name in model["vocab"]}
    for added in document.get("added_tokens", []):
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    unknown = model["vocab"].get(model.get("unk_token"))
    if unknown is not None and model.get("byte_fallback"):
        kinds[unknown] = UNKNOWN
    beyond = [token for token in by_id if token >= vocab_size]
    if beyond:
        raise _refusal(f"with token {max(beyond)} beyond the {vocab_size} rows of the embedding")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    return tokens, [kinds.get(i, UNUSED) for i in range(vocab_size)]


def _byte_names() -> Iterator[str]:
    return (f"<0x{byte:02X}>" for byte in range(256))


def _special(
    source: Path, document: Mapping[str, Any], original: tokenizers.Tokenizer, spec: ModelSpec
) -> dict[str, Any]:
    """Special tokens by role, and which of them surround an encoded text."""
    file = source / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    plain = original.encode("a", add_special_tokens=False).ids
    whole = original.encode("a").ids
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    before, after = whole[:at], whole[at + len(plain) :]
    if len(before) > 1 or len(after) > 1:
        raise _refusal(f"that adds {before} before and {after} after a text")
    bos = before[0] if before else _id(original, config.get("bos_token"))
    bos = spec.bos_token_id if bos is None else bos
    ends = list(dict.fromkeys([*after, *spec.eos_token_ids]))
    found: dict[str, Any] = {
        PREFIX + "add_bos_token": bool(before),
        PREFIX + "add_eos_token": bool(after),
    }
    roles = {"bos": bos, **dict(zip(("eos", "eot", "eom"), ends, strict=False))}
    roles["padding"] = _id(original, config.get("pad_token"))
    roles["unknown"] = _id(original, config.get("unk_token") or document["model"].get("unk_token"))
    for role, token in roles.items():
        if token is not None:
            found[f"{PREFIX}{role}_token_id"] = token
    return found


def _id(original: tokenizers.Tokenizer, token: object) -> int | None:
    """The id of a special token, which a config writes as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return original.token_to_id(text) if isinstance(text, str) else None


def _check_ends(metadata: Mapping[str, Any], spec: ModelSpec) -> None:
    lost = set(spec.eos_token_ids) - set(end_of_generation(metadata))
    if lost:
        raise _refusal(f"with end tokens that GGUF has no place for ({sorted(lost)})")


def _check_encoding(metadata: Mapping[str, Any], original: tokenizers.Tokenizer) -> None:
    written = tokenizer_of(metadata)
    tokens = metadata[PREFIX + "tokens"]
    control = [
        tokens[i] for i, kind in enumerate(metadata[PREFIX + "token_type"]) if kind == CONTROL
    ]
    for text in (*_PROBES, *(f"a{entry}b {entry}" for entry in control[:8])):
        if written.encode(text).ids != original.encode(text).ids:
            raise _refusal(f"that GGUF would encode otherwise ({text[:40]!r})")


def _templates(source: Path) -> dict[str, str | list[str]]:
    """The default chat template and the named ones, under llama.cpp's keys."""
    config = source / "tokenizer_config.json"
    given = read_json(config).get("chat_template") if config.is_file() else None
    named = {"default": given} if isinstance(given, str) else {}
    if isinstance(given, list):
        named = {entry["name"]: entry["template"] for entry in given}
    own = source / "chat_template.jinja"
    if own.is_file():
        named["default"] = own.read_text(encoding="utf-8")
    for file in sorted((source / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = file.read_text(encoding="utf-8")
    found: dict[str, str | list[str]] = {}
    for name, text in named.items():
        suffix = "" if name == "default" else f".{name}"
        found[f"tokenizer.chat_template{suffix}"] = text
    others = [name for name in named if name != "default"]
    return found | ({"tokenizer.chat_templates": others} if others else {})


def _refusal(what: str) -> CannotRun:
    return CannotRun(f"GGUF cannot hold a tokenizer {what}", fix=_FIX)
