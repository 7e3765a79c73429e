"""How llama.cpp splits a text into words before byte-pair merging, by `tokenizer.ggml.pre`.

Patterns are applied in order, each within the pieces that the ones before it left; matches and the
text between them become pieces. They are those of llama.cpp's src/llama-vocab.cpp. The two that
llama.cpp implements in code (groups of three digits from the right, Kimi K2) are written here as
the expressions that its comments give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """`byte_level`: words are merged in GPT-2's byte alphabet, otherwise as characters with spaces
    written as U+2581. `ignore_merges`: a word that is a token is not merged."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}|{_SYMBOLS}|{_BLANKS}"
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _BLANKS
)
_JAIS2 = (
    f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}{{1,3}}|{_SYMBOLS}|"
    r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?((?=[@])([^a-z]))*((?=[@])([^A-Z]))+#"
    r"|[^\r\n\p{L}\p{N}]?((?=[@])([^a-z]))+((?=[@])([^A-Z]))*#"
)
"""Upper-case letters, then lower-case ones; @ stands for the letters, # for what may follow."""


def _cased(letters: str, numbers: str, after: str) -> str:
    words = _CASED.replace("@", letters).replace("#", after)
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_TEKKEN = _cased(r"\p{L}", r"\p{N}", "")
_GPT4O = _cased(r"\p{L}", r"\p{N}{1,3}", _CONTRACTIONS + "?")
_GRANITE_EMBEDDING = _cased(r"\p{L}\p{M}", r"\p{N}{1,3}", _CONTRACTIONS + "?")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
)
_AFTER_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_AFTER_SYMBOL}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_SPARK = rf"{_AFTER_SYMBOL}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
# llama.cpp replaces blanks beyond ASCII before it matches, so the range leaves U+3000 out.
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
    r"\s+$",
    _CJK_HANGUL,
    r"\p{N}+",
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_BY_CASE}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
)
_PUNCTUATED = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGITS_FROM_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Groups of three from the right. As in llama.cpp the first one takes the text before it along."""

_NOT_HAN = r"(?:(?!\p{Han})\p{L})"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN}+{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"|{_SYMBOLS}|{_BLANKS}"
)
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_LINES = r"[^\n]+|[\n]+"
_DIGIT_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,))
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3))
_O200K = PreTokenizer((_GPT4O,))
_BAILING = PreTokenizer(
    (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
        rf"|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_AYA = PreTokenizer(
    (
        _DIGITS_FROM_RIGHT,
        rf"{_BY_CASE}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
    )
)


def _alike(names: str, words: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), words)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    **_alike(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA,
    ),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_BLANKS}"),
        ignore_merges=True,
    ),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}"),
    ),
    **_alike("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", _DEEPSEEK),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _SPARK, r"\p{N}")),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **_alike(
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        _DIGIT_THEN_GPT2,
    ),
    **_alike(
        "gpt-2 mpt olmo jais trillion granite-docling phi-2 jina-es jina-de gigachat "
        "jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 jina-v1-en jina-v2-code "
        "roberta-bpe",
        _PLAIN_GPT2,
    ),
    **_alike(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        _QWEN,
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "jais-2": PreTokenizer((_JAIS2,)),
    **_alike("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    **_alike("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    **_alike("poro-chat bloom gpt3-finnish", PreTokenizer((_PUNCTUATED,))),
    "viking": PreTokenizer((_PUNCTUATED, r"\p{N}")),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    **_alike("gpt-4o llama4 kanana2 talkie minimax-m2", _O200K),
    "granite-embed-multi-97m": PreTokenizer((_GRANITE_EMBEDDING,), ignore_merges=True),
    **_alike("tiny_aya cohere2moe", _AYA),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **_alike("bailingmoe bailingmoe2 llada-moe", _BAILING),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}",)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "afmoe": PreTokenizer((_DIGITS_FROM_RIGHT, _ASIAN, _DEEPSEEK3)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **_alike(
        "gemma4 granite-embed-multi-311m",
        PreTokenizer((_LINES,), add_bos=True, byte_level=False),
    ),
    "sarvam-moe": PreTokenizer((_LINES,), byte_level=False),
}
