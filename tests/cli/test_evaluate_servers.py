"""`ridgeline eval --url A --url B`: two servers compared over HTTP, each kind in its own words."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.cli.render.evaluate import server_evaluation_text
from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.external.scoring import ServerScorer
from ridgeline.optimize.quality.served_text import truncated_kl
from ridgeline.optimize.quality.user_evaluation import printed_score
from ridgeline.workflows.evaluate.evaluate_servers import (
    ServerToCompare,
    compare_by_command,
    evaluate_servers,
    recognise_server,
)

Body = dict[str, Any]
WORDS = ("a", "b", "c")


def logprobs_after(text: str, shift: float) -> list[float]:
    """A distribution that depends on the text; `shift` is how much worse the model is."""
    number = len(text) + sum(map(ord, text))
    weights = [1.0 + (number * (i + 1)) % 5 for i in range(len(WORDS))]
    total = sum(weights)
    mixed = [(1 - shift) * w / total + shift / len(WORDS) for w in weights]
    return [math.log(p) for p in mixed]


def chosen(logprobs: list[float]) -> int:
    return max(range(len(WORDS)), key=lambda i: logprobs[i])


def vllm(path: str, body: Body, shift: float) -> Body:
    if path == "/tokenize":
        return {"tokens": [ord(c) % 3 for c in body["prompt"][:40]]}
    if "prompt_logprobs" in body:
        rows: list[Body | None] = [None]
        tokens = body["prompt"]
        for place in range(1, len(tokens)):
            values = logprobs_after("x" * place, shift)
            order = sorted(range(3), key=lambda i: -values[i])
            rows.append({str(i): {"logprob": values[i], "rank": n} for n, i in enumerate(order, 1)})
        return {"choices": [{"text": "", "prompt_logprobs": rows}]}
    return {"choices": [{"logprobs": completion(body["prompt"], body["max_tokens"], shift)}]}


def completion(text: str, number: int, shift: float) -> Body:
    tokens, tops = [], []
    for _ in range(number):
        values = logprobs_after(text, shift)
        tops.append(dict(zip(WORDS, values, strict=True)))
        tokens.append(WORDS[chosen(values)])
        text += tokens[-1]
    return {"tokens": tokens, "top_logprobs": tops}


def sglang(path: str, body: Body, shift: float) -> Body:
    if path == "/v1/completions":
        return {"choices": [{"logprobs": completion(body["prompt"], body["max_tokens"], shift)}]}
    rows, tops = [], []
    for place, letter in enumerate(body["text"][:40]):
        values = logprobs_after("x" * place, shift)
        token = ord(letter) % 3
        rows.append([None if place == 0 else values[token], token, letter])
        tops.append(None if place == 0 else [[v, i, WORDS[i]] for i, v in enumerate(values)])
    values = logprobs_after(body["text"], shift)
    output = [[[value, i, WORDS[i]] for i, value in enumerate(values)]]
    meta = {"input_token_logprobs": rows, "input_top_logprobs": tops, "output_top_logprobs": output}
    return {"text": "", "meta_info": meta}


def tgi(path: str, body: Body, shift: float) -> Body:
    parameters, text = body["parameters"], body["inputs"]
    made = completion(text, parameters["max_new_tokens"], shift)
    details: Body = {
        "tokens": [{"id": WORDS.index(t), "text": t} for t in made["tokens"]],
        "top_tokens": [
            [{"id": i, "text": w, "logprob": row[w]} for i, w in enumerate(WORDS)]
            for row in made["top_logprobs"]
        ],
    }
    if parameters.get("decoder_input_details"):
        details["prefill"] = [
            {"id": ord(c) % 3, "logprob": logprobs_after("x" * n, shift)[ord(c) % 3] if n else None}
            for n, c in enumerate(text[:40])
        ]
    return {"generated_text": "", "details": details}


def llama(path: str, body: Body, shift: float) -> Body:
    made = completion(body["prompt"], body["n_predict"], shift)
    rows = [
        {
            "token": token,
            "top_logprobs": [{"id": i, "token": w, "logprob": row[w]} for i, w in enumerate(WORDS)],
        }
        for token, row in zip(made["tokens"], made["top_logprobs"], strict=True)
    ]
    return {"content": "", "completion_probabilities": rows}


PAGES: dict[str, tuple[str, Body]] = {
    "vllm": ("/none", {}),
    "sglang": ("/get_server_info", {"version": "0.5"}),
    "tgi": ("/info", {"max_total_tokens": 4096}),
    "llama-server": ("/props", {"default_generation_settings": {}}),
}
SERVERS: dict[str, Callable[[str, Body, float], Body]] = {
    "vllm": vllm,
    "sglang": sglang,
    "tgi": tgi,
    "llama-server": llama,
}


@contextmanager
def server(kind: str, shift: float = 0.0, twin: str = "") -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page, document = PAGES[kind]
            owner = "vllm" if kind == "vllm" else "someone"
            if self.path == "/metrics" and twin:
                self.reply(
                    text=f'vllm:num_requests_running 0\nridgeline_twin{{device="{twin}"}} 1\n'
                )
            elif self.path == "/v1/models":
                self.reply({"data": [{"id": "m", "owned_by": owner}]})
            elif self.path == page:
                self.reply(document)
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(SERVERS[kind](self.path, body, shift))

        def reply(self, document: Body | None = None, text: str = "") -> None:
            data = (text or json.dumps(document)).encode()
            self.send_response(200)
            if twin:
                self.send_header("x-ridgeline-twin", twin)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_every_kind_is_recognised_and_a_worse_model_is_found(kind: str) -> None:
    with server(kind) as a, server(kind, shift=0.6) as b:
        assert recognise_server(a) == kind
        same = evaluate_servers(ServerToCompare(url=a), ServerToCompare(url=a), budget_s=2)
        worse = evaluate_servers(ServerToCompare(url=a), ServerToCompare(url=b), budget_s=2)
    named = {check.name: check for check in worse.checks}
    if kind != "tgi":  # TGI gives no other tokens of a text
        # One position per text decides less than every position.
        assert named["KL mean (nats)"].measured.mid > 0.01
        assert kind == "llama-server" or worse.verdict == "fail"
    if kind != "llama-server":
        assert "perplexity ratio" in named
    assert all(check.measured.mid in (0.0, 1.0) for check in same.checks)
    assert same.verdict != "fail"
    assert worse.kinds == (kind, kind)


def test_report_names_the_twin_and_fits_80_columns() -> None:
    with server("vllm", twin="2 x h100-sxm, modelled") as a, server("vllm", shift=0.6) as b:
        found = evaluate_servers(ServerToCompare(url=a), ServerToCompare(url=b), budget_s=0)
    assert found.twins == ("a twin of vllm: 2 x h100-sxm, modelled", "")
    unmeasured = {"questions": "A answers none of them rightly, " + "whatever it is asked, " * 4}
    text = server_evaluation_text(msgspec.structs.replace(found, unmeasured=unmeasured))
    assert f"A  {a} (a twin of vllm: 2 x h100-sxm, modelled)\n" in text
    assert f"B  {b} (vllm)\n" in text and "near ties" in text
    assert max(map(len, text.split("\n"))) <= 80


def test_scores_are_those_of_the_text() -> None:
    with server("vllm") as url:
        rows = ServerScorer(url, "m", "vllm").score_text("hello")
    for place, (letter, row) in enumerate(zip("hello"[1:], rows, strict=True), 1):
        expected = logprobs_after("x" * place, 0.0)[ord(letter) % 3]
        assert row.logprob == pytest.approx(expected)
    with server("llama-server") as url, pytest.raises(CannotRun, match="does not score"):
        ServerScorer(url, "m", "llama-server").score_text("hello")


def test_truncated_divergence_is_a_lower_bound() -> None:
    before = {"a": math.log(0.6), "b": math.log(0.3), "c": math.log(0.1)}
    after = {"a": math.log(0.3), "b": math.log(0.3), "c": math.log(0.4)}
    whole = sum(math.exp(v) * (v - after[k]) for k, v in before.items())
    assert truncated_kl(before, after) == pytest.approx(whole, abs=1e-6)
    top = {"a": before["a"], "b": before["b"]}
    assert 0 < truncated_kl(top, {"a": after["a"], "b": after["b"]}) <= whole
    assert truncated_kl(before, before) == pytest.approx(0, abs=1e-6)
    assert truncated_kl({"a": math.log(0.9)}, {"b": math.log(0.9)}) > 1
    # Four tokens of a quarter each, of which the two servers name different ones.
    assert truncated_kl({"a": math.log(0.25)}, {"b": math.log(0.25)}) == 0.0


def test_command_decides_by_exit_code_or_score(tmp_path: Path) -> None:
    script = tmp_path / "evals.py"
    script.write_text(
        "import sys\nprint('{\"score\": %s}' % (0.9 if 'good' in sys.argv[1] else 0.7))"
    )
    command = f"{sys.executable} {script} {{url}}"
    assert compare_by_command(command, "good", "good", 0.0).verdict == "pass"
    assert compare_by_command(command, "good", "bad", 0.1).verdict == "fail"
    assert compare_by_command(command, "good", "bad", 0.3).verdict == "pass"
    fails_on_b = "sh -c 'test {url} = good'"
    assert compare_by_command(fails_on_b, "good", "bad", 0.0).verdict == "fail"
    with pytest.raises(CannotRun, match="fails on A"):
        compare_by_command(fails_on_b, "bad", "good", 0.0)
    with pytest.raises(BadInput, match="url"):
        compare_by_command("pytest evals", "a", "b", 0.0)


@pytest.mark.parametrize(
    ("output", "score"),
    [("0.75", 0.75), ('a\n{"score": 2}', 2.0), ("3 passed", 1.0), ("", 1.0), ("true", 1.0)],
)
def test_score_is_read_from_the_last_line(output: str, score: float) -> None:
    assert printed_score(output) == score


@pytest.mark.parametrize(
    "words", [["--url", "http://a"], ["demo"], ["demo", "demo", "--url", "a", "--url", "b"]]
)
def test_two_models_or_two_servers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 2
    assert "--url" in capsys.readouterr().err
