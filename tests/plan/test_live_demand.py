"""`plan --from-traffic`: the demand of a running server, by every server's names of its metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import ridgeline
from ridgeline.cli.main import main
from ridgeline.errors import BadInput, CannotRun
from ridgeline.plan.fleet.demand import demand_of_traffic
from ridgeline.records.traffic import LengthProfile, TrafficProfile

Page = Callable[[int], str]
BOUNDS = (100, 500, 1000, 2000, 5000)
PROMPT, OUTPUT = 800, 200


def histogram(name: str, values: list[int]) -> list[str]:
    lines = [
        f'{name}_bucket{{le="{bound}"}} {sum(value <= bound for value in values)}'
        for bound in BOUNDS
    ]
    return [
        *lines,
        f'{name}_bucket{{le="+Inf"}} {len(values)}',
        f"{name}_sum {sum(values)}",
        f"{name}_count {len(values)}",
    ]


def vllm(number: int) -> str:
    tokens = number * PROMPT
    return "\n".join(
        [
            *histogram("vllm:request_prompt_tokens", [PROMPT] * number),
            *histogram("vllm:request_generation_tokens", [OUTPUT] * number),
            f'vllm:request_success_total{{finished_reason="stop"}} {number}',
            f"vllm:prefix_cache_queries_total {tokens}",
            f"vllm:prefix_cache_hits_total {tokens // 2}",
            "vllm:num_requests_running 1",
        ]
    )


def sglang(number: int) -> str:
    return "\n".join(
        [
            f"sglang:prompt_tokens_total {number * PROMPT}",
            f"sglang:generation_tokens_total {number * OUTPUT}",
            f"sglang:num_requests_total {number}",
            "sglang:cache_hit_rate 0.5",
        ]
    )


def tgi(number: int) -> str:
    return "\n".join(
        [
            *histogram("tgi_request_input_length", [PROMPT] * number),
            *histogram("tgi_request_generated_tokens", [OUTPUT] * number),
            f"tgi_request_success {number}",
        ]
    )


def llama_cpp(number: int) -> str:
    return f"llamacpp:prompt_tokens_total {number * PROMPT}"


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server whose pages count ten more requests at each reading."""
    servers = []

    def start(page: Page, step: int = 10) -> str:
        number = 1000

        class Metrics(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                nonlocal number
                assert self.path == "/metrics"
                body = f"{page(number)}\n".encode()
                number += step
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("page", "cached"), [(vllm, 400), (sglang, 400), (tgi, 0)])
def test_plan_takes_the_demand_from_the_metrics(
    page: Page, cached: int, serve: Callable[..., str]
) -> None:
    result = ridgeline.plan(
        "llama-3.1-8b",
        from_traffic=serve(page),
        traffic_duration=0.1,
        accelerator="h100-sxm",
        quantization="bfloat16",
        kv_cache_dtype="bfloat16",
        price_per_hour=2.0,
        max_devices=1,
    )
    demand, traffic = result.demand, result.traffic
    assert traffic is not None and traffic.profile.num_requests >= 20
    assert (demand.isl, demand.osl, demand.cached) == (PROMPT, OUTPUT, cached)
    assert demand.rate == pytest.approx(traffic.profile.num_requests / traffic.duration_s)
    assert "requests finished in" in result.notes[0]
    assert ("prefix sharing" in result.notes[0]) == (page is tgi)


def test_server_that_counts_no_requests_or_has_none_is_refused(serve: Callable[..., str]) -> None:
    options = {"traffic_duration": 0.05, "accelerator": "h100-sxm", "max_devices": 1}
    with pytest.raises(CannotRun, match="no request finished"):
        ridgeline.plan("llama-3.1-8b", from_traffic=serve(llama_cpp), **options)
    with pytest.raises(CannotRun, match="no request finished"):
        ridgeline.plan("llama-3.1-8b", from_traffic=serve(vllm, 0), **options)
    with pytest.raises(CannotRun, match="metrics cannot be read"):
        ridgeline.plan("llama-3.1-8b", from_traffic="http://127.0.0.1:9", **options)
    with pytest.raises(BadInput, match="input_len has no effect with from_traffic"):
        ridgeline.plan("llama-3.1-8b", from_traffic="http://127.0.0.1:9", input_len=5, **options)


def test_options_of_the_load_are_refused_with_a_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["plan", "llama-3.1-8b", "--from-traffic", "http://127.0.0.1:9"]
    for words in (["--request-rate", "3"], ["--workload", "chat"]):
        assert main([*base, *words]) == 2
        assert words[0] in capsys.readouterr().err
    assert main(["plan", "llama-3.1-8b", "--traffic-duration", "5"]) == 2
    assert "--from-traffic" in capsys.readouterr().err


def test_quantiles_come_from_bins_and_the_longest_from_the_last_of_them() -> None:
    prompt = LengthProfile(mean=700, bounds=(100.0, 1000.0, 4000.0), counts=(0, 90, 10, 0))
    demand = demand_of_traffic(
        TrafficProfile(num_requests=100, prompt=prompt, output=LengthProfile(mean=50), rate=2.0)
    )
    assert demand.isl_p95 == 2500 and demand.longest == 4050 and demand.isl == 700
    assert demand.input_cv2 == pytest.approx(prompt.cv**2) and demand.cached == 0
    known = LengthProfile.of(tuple(range(1, 101)))
    assert known.quantile(0.95) == 96 and known.quantile(1.0) == 100
    assert LengthProfile(mean=40).quantile(0.95) == 40
    with pytest.raises(BadInput, match="no output lengths and no request rate"):
        demand_of_traffic(TrafficProfile(num_requests=0, prompt=prompt, output=None))
