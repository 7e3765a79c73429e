"""Random clients. Each sends one request and checks that exactly one outcome comes back.

What a request may end in depends on what the client did and on which faults have been injected; a
text must always be the beginning of the one that the model would write if it served the request
alone, and all of it if the response says that it is complete.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from ridgeline.engine.scheduler.stopping import derive_seed
from tests.simulation.model import expected_tokens, root_of
from tests.simulation.models import OTHER_MODEL, OTHER_SALT
from tests.simulation.network import Connection, Link, Reply
from tests.simulation.server import KEYS, OPERATOR_KEY, SimulatedServer, demo

WORDS = ("the", "import", "def", "class", "self", "return", "value", "for", "number", "list")
MALFORMED = (
    b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": 5.5}', b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "n": 0}', b"\xff\xfe\x00",
    b'{"prompt": [[]], "max_tokens": 2}', b'{"prompt": "\\ud800"}', b'{"prompt": [99999999]}',
    b'{"prompt": "x", "stop": [1]}', b'{"prompt": "x", "seed": "a"}', b"[" * 3000,
    b'{"prompt": "x", "logit_bias": {"a": 1}}', b'{"messages": [{"role": "nobody"}]}',
    b'{"prompt": "x", "model": "another"}', b'{"prompt": "x", "response_format": {"type": "y"}}',
)  # fmt: skip


def credentials(world: World, rng: random.Random) -> dict[str, str]:
    """The header of one of the server's keys, if it has any."""
    if world.sim.setup.options.api_keys_file is None:
        return {}
    return {"authorization": f"Bearer {rng.choice(KEYS)}"}


class World(Protocol):
    """What clients see of a simulation."""

    sim: SimulatedServer
    is_broken: bool  # the engine has died

    @property
    def is_draining(self) -> bool: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Target:
    """The model or adapter that a request names. `root`: the state that its answers begin with."""

    name: str | None = None
    adapter: str | None = None
    root: int = root_of(0, 0)


BASE = Target()


def choose_target(world: World, rng: random.Random) -> Target:
    """The first model, the other one, or an adapter that was loaded at some time."""
    targets = [Target(), Target("demo")]
    if world.sim.setup.has_other_model:
        targets += [Target(OTHER_MODEL, root=root_of(OTHER_SALT, 0))] * 2
    for name in world.sim.adapters.names:
        roots = world.sim.adapters.roots_since(name, world.sim.loop.now_s)
        targets += [Target(name, name, roots[-1] if roots else root_of(0, 0))] * 2
    return rng.choice(targets)


@dataclass
class Answer:
    """What one choice must be."""

    text: str
    reason: str
    num_tokens: int


@dataclass
class Generation:
    """A request for text, and what it must be answered with."""

    path: str
    body: dict[str, Any]
    prompt: list[int]
    adapter: str | None = None
    answers: list[Answer] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        return "chat" in self.path


def random_generation(
    rng: random.Random,
    max_model_len: int,
    *,
    in_batch: bool = False,
    target: Target = BASE,
) -> Generation:
    """A completion or a chat with a seed, so that its answer is known."""
    tokenizer, is_chat = demo()[1], in_batch or rng.random() < 0.3
    words = [rng.choice(WORDS) for _ in range(rng.choice((1, 3, 8, 20, 40)))]
    shared = "import the list of all values and " * rng.choice((0, 0, 1, 2))
    text = shared + " ".join(words)
    body: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, 5, 12, 30)),
        "seed": rng.randrange(1 << 30),
        "temperature": rng.choice((0, 0.7)),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "stream": not in_batch and rng.random() < 0.5,
    }
    if target.name is not None:
        body["model"] = target.name
    if is_chat:
        body["messages"] = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(body["messages"])
    else:
        body["prompt"] = text
        prompt = tokenizer.encode(text)
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice(("a", "b"))
    if rng.random() < 0.15 and not in_batch:
        body["timeout_ms"] = rng.choice((20, 200, 2000))
    if rng.random() < 0.2:
        body["priority"] = rng.randrange(5)
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    generation = Generation(path, body, prompt, target.adapter)
    if rng.random() < 0.25:
        whole = rng.choice(answers_of(generation, max_model_len, target.root)).text
        begin = rng.randrange(len(whole) + 1)
        stop = whole[begin : begin + rng.randint(1, 6)]
        if stop:
            body["stop"] = stop
    generation.answers = answers_of(generation, max_model_len, target.root)
    return generation


def answers_of(generation: Generation, max_model_len: int, root: int) -> list[Answer]:
    """The answers of the model, or version of an adapter, with this root."""
    vocabulary, body = demo()[2], generation.body
    room = min(body["max_tokens"], max_model_len - len(generation.prompt))
    answers = []
    for index in range(body["n"]):
        seed = derive_seed(body["seed"], index)
        tokens = expected_tokens(vocabulary, generation.prompt, seed, room, root)
        pieces = [vocabulary.texts.get(token, "") for token in tokens]
        answers.append(_answer(tokens, pieces, body.get("stop"), vocabulary.eos))
    return answers


def _answer(tokens: list[int], pieces: list[str], stop: str | None, eos: int) -> Answer:
    text = ""
    for count, piece in enumerate(pieces, start=1):
        text += piece
        if stop is not None and stop in text:
            return Answer(text[: text.index(stop)], "stop", count)
    return Answer(text, "stop" if tokens and tokens[-1] == eos else "length", len(tokens))


async def generate(world: World, rng: random.Random, name: str) -> None:
    """A request for text by a client that may read slowly or hang up."""
    max_model_len = world.sim.engine.info.max_model_len
    generation = random_generation(rng, max_model_len, target=choose_target(world, rng))
    began_s = world.sim.loop.now_s
    is_slow = rng.random() < 0.15
    link = Link(latency_s=0.01, window=200, chunk=100, read_s=0.2) if is_slow else Link()
    connection = Connection(world.sim.loop, rng, link)
    leaves = rng.random() < 0.25
    if leaves:
        world.sim.loop.call_later(rng.choice((0.001, 0.02, 0.1, 0.5)), connection.hang_up)
    body = json.dumps(generation.body).encode()
    headers = {"content-type": "application/json"} | credentials(world, rng)
    reply = await connection.request("POST", generation.path, body, headers)
    if generation.adapter is not None:
        find_version(world, generation, reply, began_s)
    outcome = check_reply(world, generation, reply, leaves=leaves, is_slow=is_slow)
    kind = generation.body.get("model", "")
    world.note(f"{name} {kind} {outcome}" if kind else f"{name} {outcome}")
    if not leaves:
        connection.hang_up()


def find_version(world: World, generation: Generation, reply: Reply, began_s: float) -> None:
    """Expect the answers of the version that has answered: one that was loaded meanwhile."""
    assert generation.adapter is not None
    max_model_len = world.sim.engine.info.max_model_len
    texts, _, _ = read_texts(generation, reply)
    roots = world.sim.adapters.roots_since(generation.adapter, began_s)
    for root in roots:
        answers = answers_of(generation, max_model_len, root)
        if all(answers[index].text.startswith(text) for index, text in texts.items()):
            generation.answers = answers
            return
    assert not any(texts.values()), f"no version of {generation.adapter} writes {texts}"


def check_reply(
    world: World, generation: Generation, reply: Reply, *, leaves: bool, is_slow: bool
) -> str:
    """The outcome, which must be one that is possible."""
    texts, error, is_whole = read_texts(generation, reply)
    for index, text in texts.items():
        whole = generation.answers[index].text
        assert whole.startswith(text), f"wrong text: {text!r} instead of {whole!r}"
    code = reply.status if reply.status != 200 else 0 if error is None else int(error)
    if is_whole:
        assert not code, f"a whole response with the error {code}"
        check_whole(generation, reply, texts)
        return "whole"
    if code:
        assert code in possible_errors(world, generation, reply, is_slow=is_slow), (
            f"status {code}: {reply.body[:300]!r} {generation}"
        )
        if code == 400 and b"chat template" in reply.body:
            world.sim.renderers.num_refused += 1
        return f"error {code}"
    assert leaves or is_slow or world.is_draining, f"the response breaks off: {reply}"
    return "cut"


def possible_errors(
    world: World, generation: Generation, reply: Reply, *, is_slow: bool
) -> set[int]:
    codes = {503}  # the queue may always be full
    if has_failing_steps(world) or world.is_broken:
        codes.add(500)
    if "timeout_ms" in generation.body or is_slow:
        codes.add(408)
    if generation.is_chat and world.sim.renderers.num_failed:
        codes.add(400)
    if len(generation.prompt) >= world.sim.engine.info.max_model_len:
        codes.add(400)
    if generation.adapter is not None:  # it is not loaded, or unloaded before its answer ends
        codes |= {404, 400} if b"adapter" in reply.body else {404}
    options = world.sim.setup.options
    if options.requests_per_minute is not None or options.api_keys_file is not None:
        codes.add(429)
    return codes


def has_failing_steps(world: World) -> bool:
    faults = world.sim.setup.faults
    return bool(faults.num_injected or faults.num_nan)


def check_whole(generation: Generation, reply: Reply, texts: dict[int, str]) -> None:
    """A complete response has every choice's whole text, its reason and the right usage."""
    expected = {index: answer.text for index, answer in enumerate(generation.answers)}
    assert {index: texts.get(index, "") for index in expected} == expected
    reasons, usage = _ends(reply, streams=generation.body["stream"])
    assert reasons == {i: answer.reason for i, answer in enumerate(generation.answers)}, reasons
    if usage is not None:
        assert usage["prompt_tokens"] == len(generation.prompt)
        num_tokens = sum(answer.num_tokens for answer in generation.answers)
        assert usage["completion_tokens"] == num_tokens, f"{usage}, expected {num_tokens} tokens"


def read_texts(generation: Generation, reply: Reply) -> tuple[dict[int, str], str | None, bool]:
    """Texts by choice, the code of an error, and whether the response says it is complete."""
    if reply.status != 200:
        if reply.is_complete:
            assert reply.json()["error"]["message"], "an error without words"
        return {}, None, False
    texts: dict[int, str] = {}
    if not generation.body["stream"]:
        if not reply.is_complete:
            return {}, None, False
        for choice in reply.json()["choices"]:
            message = choice["message"]["content"] if generation.is_chat else choice["text"]
            texts[choice["index"]] = message or ""
        return texts, None, True
    error, is_done = None, False
    for event in _events(reply):
        assert not is_done, "an event after the end"
        is_done = event is None
        if event is None:
            continue
        if "error" in event:
            error = str(event["error"]["code"])
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") if generation.is_chat else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return texts, error, is_done and error is None


def _events(reply: Reply) -> list[dict[str, Any] | None]:
    """The events of a stream that have arrived whole; None for the end."""
    lines = reply.body.decode(errors="replace").split("\n\n")[:-1]
    datas = [line.removeprefix("data: ") for line in lines]
    return [None if data == "[DONE]" else json.loads(data) for data in datas]


def _ends(reply: Reply, *, streams: bool) -> tuple[dict[int, str], dict[str, int] | None]:
    events = [event for event in _events(reply) if event] if streams else [reply.json()]
    reasons: dict[int, str] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                assert choice["index"] not in reasons, "a choice finishes twice"
                reasons[choice["index"]] = choice["finish_reason"]
    return reasons, usage


async def send_malformed(world: World, rng: random.Random, name: str) -> None:
    """A body that no route accepts."""
    connection = Connection(world.sim.loop, rng)
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"))
    body = rng.choice(MALFORMED)
    headers = {"content-type": "application/json"} | credentials(world, rng)
    reply = await connection.request("POST", path, body, headers)
    allowed = {400, 404, 413, 429, 503} | ({0} if world.is_draining else set())
    if path == "/tokenize" or (path == "/v1/embeddings" and not world.is_broken):
        allowed.add(200)  # some of the bodies are right there
    assert reply.status in allowed, f"{reply.status} for {body[:80]!r} at {path}: {reply.body!r}"
    world.note(f"{name} malformed {reply.status}")
    connection.hang_up()


async def break_protocol(world: World, rng: random.Random, name: str) -> None:
    """Bytes that are no HTTP, or a request that stops half-way."""
    connection = Connection(world.sim.loop, rng)
    data = rng.choice(
        (
            b"\x16\x03\x01\x02\x00\x01",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n\r\n{",
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0",
        )
    )
    connection._write(data)
    if rng.random() < 0.5:
        await asyncio.sleep(rng.choice((0.01, 1.0)))
        connection.hang_up()
    reply = await connection.wait(300)
    refused = {401} if world.sim.setup.options.api_keys_file is not None else set()
    assert reply.status in {0, 400, 408, 429, 503} | refused, reply
    world.note(f"{name} broken {reply.status}")


async def embed(world: World, rng: random.Random, name: str) -> None:
    """Some texts as vectors."""
    connection = Connection(world.sim.loop, rng)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(rng.randint(1, 4))]
    leaves = rng.random() < 0.2
    if leaves:
        world.sim.loop.call_later(0.01, connection.hang_up)
    body = json.dumps({"input": texts}).encode()
    headers = {"content-type": "application/json"} | credentials(world, rng)
    reply = await connection.request("POST", "/v1/embeddings", body, headers)
    if reply.is_complete and reply.status == 200:
        assert [item["index"] for item in reply.json()["data"]] == list(range(len(texts)))
    else:
        assert reply.status in (429, 503) or leaves or world.is_draining, reply
    world.note(f"{name} embed {reply.status}")
    connection.hang_up()


async def probe(world: World, rng: random.Random, name: str) -> None:
    """A load balancer or a scraper, several times on one connection."""
    connection = Connection(world.sim.loop, rng)
    for _ in range(rng.randint(1, 4)):
        path = rng.choice(("/health", "/ready", "/metrics", "/v1/models", "/version"))
        is_dead = not world.sim.engine._loop._open  # a broken one lives until its next step
        reply = await connection.request("GET", path, b"", credentials(world, rng))
        allowed = {200, 429} | ({0, 503} if world.is_draining or world.is_broken else set())
        if has_failing_steps(world):  # three in a row make the engine unhealthy
            allowed.add(503)
        assert reply.status in allowed, f"{path}: {reply}"
        if connection.is_over:
            break
        if path == "/health" and is_dead:
            assert reply.status == 503, "a dead engine is reported as healthy"
        await asyncio.sleep(rng.random())
    world.note(f"{name} probe")
    connection.hang_up()


async def intrude(world: World, rng: random.Random, name: str) -> None:
    """Someone without a key, or with a wrong one."""
    if world.sim.setup.options.api_keys_file is None:
        return
    connection = Connection(world.sim.loop, rng)
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/files"))
    wrong = rng.choice(({}, {"authorization": "Bearer wrong"}, {"x-api-key": KEYS[0] + "x"}))
    body = b'{"prompt": "x", "messages": []}'
    reply = await connection.request(
        "POST", path, body, {"content-type": "application/json", **wrong}
    )
    allowed = {401} | ({0, 503} if world.is_draining else set())
    assert reply.status in allowed, f"{reply.status} without a key at {path}"
    world.note(f"{name} refused {reply.status}")
    connection.hang_up()


async def change_adapters(world: World, rng: random.Random, name: str) -> None:
    """An operator, who loads other weights under one name again and again."""
    if not world.sim.setup.max_adapters:
        return
    sim, adapter = world.sim, f"tuned-{name.split()[-1]}"
    connection = Connection(sim.loop, rng)
    version = None
    for _ in range(rng.randint(1, 6)):
        if version is None:
            tried = sim.adapters.begin(adapter, sim.loop.now_s)
            body = {"lora_name": adapter, "lora_path": str(tried.id)}
            status = await _operate(world, connection, "load", body)
            if status in (200, 0):  # without a response, it may have been loaded
                version = tried
            else:
                sim.adapters.versions.remove(tried)
                assert status != 400 or len(sim.adapters.names) >= sim.setup.max_adapters
        else:
            status = await _operate(world, connection, "unload", {"lora_name": adapter})
            if status == 200:
                version.unloaded_s, version = sim.loop.now_s, None
            assert status != 400, "a loaded adapter cannot be unloaded"
        world.note(f"{name} {adapter} {'unloaded' if version is None else version.id} {status}")
        if connection.is_over:
            break
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.3)))
    connection.hang_up()


async def _operate(world: World, connection: Connection, verb: str, body: dict[str, Any]) -> int:
    headers = {"content-type": "application/json"}
    if world.sim.setup.options.api_keys_file is not None:
        headers["authorization"] = f"Bearer {OPERATOR_KEY}"
    path = f"/v1/{verb}_lora_adapter"
    reply = await connection.request("POST", path, json.dumps(body).encode(), headers)
    allowed = {200, 400, 429, 503} | ({0} if world.is_draining else set())
    assert reply.status in allowed, f"{path}: {reply}"
    return reply.status


Client = Callable[[World, random.Random, str], Coroutine[Any, Any, None]]
CLIENTS: tuple[tuple[Client, int], ...] = (
    (generate, 12), (send_malformed, 2), (break_protocol, 1), (embed, 1), (probe, 1),
    (intrude, 1), (change_adapters, 2),
)  # fmt: skip
