"""What context reduction saves and loses on retrieved passages.

    python benchmarks/bench_context.py [--model smollm2] [--requests 24] [--needles 8]

The passages are paragraphs of this repository's guides. First part: requests over a few topics,
each with the five passages of its topic in a drawn order and one of them twice; sent one after the
other with the documents as given, without duplicates, and in canonical order too. Prints prompt
tokens, tokens from the prefix cache and the time to the first token.

Second part: a sentence with a code among eight passages; the documents are compressed to keep
ratios by sentences and by words. Prints whether the code is left in the prompt, whether the answer
contains it, and the time to the answer's first token, when the documents are new and when they were
compressed before. Then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from ridgeline import Engine
from ridgeline.config.server import ServerOptions
from ridgeline.hub.download import ensure_downloaded
from ridgeline.serve.app import create_app
from ridgeline.serve.context.reduce import CONTEXT_HEADER

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
VARIANTS: dict[str, dict[str, Any] | None] = {
    "as given": None,
    "duplicates dropped": {"deduplicate": "exact"},
    "and in canonical order": {"deduplicate": "exact", "order": "canonical"},
}


def passages() -> list[str]:
    """Paragraphs of prose of 300 to 700 characters, without code and tables."""
    found = []
    for path in sorted(GUIDES.glob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [" ".join(part.split()) for part in text.split("\n\n")]
    return [text for text in found if 300 <= len(text) <= 700 and text[0].isalpha()]


class Client:
    """Sends chats to an app of its own over the engine; every one has its tenant."""

    def __init__(self, engine: Engine) -> None:
        app = create_app(engine, ServerOptions())
        transport, self._model = httpx.ASGITransport(app), app.state.service.name
        url = "http://127.0.0.1"
        self._http = httpx.AsyncClient(transport=transport, base_url=url, timeout=600)
        self._decode, self.last_prompt = engine.tokenizer.decode, ""

    async def ask(self, salt: str, question: str, documents: list[str], **fields: Any) -> Any:
        """Answer, usage, seconds to the first token (the whole response: one token is timed)."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "documents": documents,
            "model": self._model,
            "temperature": 0,
            "cache_salt": salt,
            **{name: value for name, value in fields.items() if value is not None},
        }
        begun = time.perf_counter()
        reply = await self._http.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - begun
        reply.raise_for_status()
        found = reply.json()
        self.last_prompt = self._decode(found.get("prompt_token_ids") or [])
        text = found["choices"][0]["message"]["content"] or ""
        return text, found["usage"], seconds, reply.headers.get(CONTEXT_HEADER, "")


async def share_prefixes(client: Client, texts: list[str], num_requests: int) -> dict[str, Any]:
    draw, report = random.Random(7), {}
    topics = [texts[i : i + 5] for i in range(0, 20, 5)]
    requests = []
    for i in range(num_requests):
        documents = draw.sample(topics[i % len(topics)], 5)
        requests.append([*documents, documents[0]])
    for name, reduction in VARIANTS.items():
        rows = [
            await client.ask(name, f"Question {i}: which is best?", documents,
                             max_tokens=1, context_reduction=reduction)
            for i, documents in enumerate(requests)
        ]  # fmt: skip
        cached = [row[1]["prompt_tokens_details"]["cached_tokens"] for row in rows]
        report[name] = {
            "prompt_tokens": sum(row[1]["prompt_tokens"] for row in rows),
            "cached_tokens": sum(cached),
            "median_ttft_ms": 1000 * statistics.median(row[2] for row in rows),
            "mean_ttft_ms": 1000 * statistics.fmean(row[2] for row in rows),
        }
        print(name, report[name])
    return report


async def find_needles(client: Client, texts: list[str], num_needles: int) -> list[dict[str, Any]]:
    rows = []
    for unit in ("sentence", "word"):
        for ratio in (1.0, 0.75, 0.5, 0.25):
            kept, right, first, again, tokens = 0, 0, [], [], []
            for i in range(num_needles):
                draw = random.Random(i)
                code = str(draw.randint(10_000, 99_999))
                documents = draw.sample(texts, 8)
                place = draw.randrange(8)
                sentences = documents[place].split(". ")
                sentences.insert(len(sentences) // 2, f"The access code of the vault is {code}")
                documents[place] = ". ".join(sentences)
                salt = f"{unit}-{ratio}-{i}"
                reduction = None if ratio == 1 else {"keep_ratio": ratio, "keep_unit": unit}
                question = "What is the access code of the vault? Answer with the number."
                fields = {"max_tokens": 1, "context_reduction": reduction}
                first.append((await client.ask(salt, question, documents, **fields))[2])
                again.append((await client.ask(salt, question + " ", documents, **fields))[2])
                fields |= {"max_tokens": 24, "return_token_ids": True}
                text, usage, *_ = await client.ask(salt, question, documents, **fields)
                right += code in text
                kept += code in client.last_prompt
                tokens.append(usage["prompt_tokens"])
            rows.append({
                "unit": unit, "keep_ratio": ratio, "needles": num_needles, "kept": kept,
                "answered": right, "prompt_tokens": round(statistics.fmean(tokens)),
                "ttft_new_ms": 1000 * statistics.median(first),
                "ttft_again_ms": 1000 * statistics.median(again),
            })  # fmt: skip
            print(rows[-1])
    return rows


async def run(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    client, texts = Client(engine), passages()
    random.Random(1).shuffle(texts)
    await client.ask("warm", "Hello", texts[:1], max_tokens=1)
    shared = await share_prefixes(client, texts, args.requests)
    return {"shared": shared, "needles": await find_needles(client, texts[20:], args.needles)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    for name, default in (("requests", 24), ("needles", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    ensure_downloaded(args.model)
    with Engine.open(args.model, max_model_len=4096) as engine:
        print(json.dumps(asyncio.run(run(engine, args))))


if __name__ == "__main__":
    main()
