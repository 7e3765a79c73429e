"""Access control: keys, hosts, origins, rate limits, and addresses to listen on."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput
from ridgeline.serve.app import create_admin_app, create_app
from ridgeline.serve.auth.keys import ApiKey, KeyRing, load_keys, new_key
from ridgeline.serve.auth.middleware import OPEN_PATHS
from ridgeline.serve.auth.rate_limit import TokenBucket
from ridgeline.serve.server import check_exposed
from tests.serve.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
SESAME = {"authorization": "Bearer sesame"}


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def guarded(engine: FakeEngine | None = None, **options: Any) -> httpx.AsyncClient:
    return client_of(create_app(engine or FakeEngine(), ServerOptions(**options)))


# keys


ODD_PATHS = (
    "/V1/models", "/v1/models/", "//v1/models", "/v1//models", "/health/../v1/models", "/health/",
    "/%76%31/models", "/v1/models?x=/health", "/health%2f..%2fv1%2fmodels", "/healthz", "/",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT"])
async def test_every_route_but_the_open_ones_needs_a_key(method: str) -> None:
    async with guarded(api_key="sesame") as http:
        paths = create_app(FakeEngine()).openapi()["paths"]
        for path in {*paths, *ODD_PATHS, "/admin/state", "/openapi.json"} - OPEN_PATHS:
            reply = await http.request(method, path)
            assert reply.status_code == 401, (method, path, reply.status_code)
        for path in OPEN_PATHS:
            assert (await http.get(path)).status_code == 200


async def test_root_path_and_forwarding_headers_open_nothing() -> None:
    async with guarded(api_key="sesame") as http:
        for name, value in (
            ("x-forwarded-prefix", "/health"),
            ("x-original-url", "/health"),
            ("x-forwarded-for", "127.0.0.1"),
            ("x-http-method-override", "GET"),
        ):
            assert (await http.get("/v1/models", headers={name: value})).status_code == 401


@pytest.mark.parametrize(
    "headers", [SESAME, {"authorization": "bearer sesame"}, {"x-api-key": "sesame"}]
)
async def test_key_is_accepted_in_either_header(headers: dict[str, str]) -> None:
    async with guarded(api_key="sesame") as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


def test_keys_are_hashed_in_the_file(tmp_path: Path) -> None:
    key, entry = new_key('al"ice')
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    assert key not in entry
    caller = load_keys(None, str(file)).find(key.encode())
    assert caller is not None and caller.name == 'al"ice' and not caller.admin
    assert load_keys(None, str(file)).find(b"other") is None
    assert load_keys(None, str(file)).find(sha256(key.encode()).hexdigest().encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = 3",
        "[[keys]]\nname = 'a'",
        "[[keys]]\nname = 'a'\nsha256 = 'abc'",
        "[[keys]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nadmim = true",
        ("[[keys]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\n") * 2,
        "[[keys]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\ntokens_per_minute = 0",
    ],
)
def test_bad_key_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(BadInput):
        load_keys(None, str(file))
    with pytest.raises(BadInput):
        load_keys(None, str(tmp_path / "missing"))
    with pytest.raises(BadInput):
        load_keys(" ", None)


def ring_of(*keys: ApiKey) -> KeyRing:
    return KeyRing(keys, secret=b"s" * 32)


def key_of(name: str, **more: Any) -> ApiKey:
    return ApiKey(name=name, sha256=sha256(name.encode()).hexdigest(), **more)


def test_tenants_never_share_prefixes_unless_their_group_says_so() -> None:
    ring = ring_of(
        key_of("a"), key_of("b"), key_of("c", cache_group="t"), key_of("d", cache_group="t")
    )
    a, b, c, d = (ring.find(name) for name in (b"a", b"b", b"c", b"d"))
    assert a and b and c and d
    salts = [caller.tenant(None) for caller in (a, b, c)]
    assert len(set(salts)) == 3 and all(len(salt) > 32 for salt in salts)
    assert c.tenant(None) == d.tenant(None) != c.tenant("x")
    assert a.tenant("x") not in (b.tenant("x"), "x")


async def test_tenant_reaches_the_engine(tmp_path: Path) -> None:
    file, engine = tmp_path / "keys.toml", FakeEngine()
    (one, first), (two, second) = new_key("one"), new_key("two")
    file.write_text(first + second)
    async with guarded(engine, api_keys_file=str(file)) as http:
        for key in (one, two, one):
            headers = {"authorization": f"Bearer {key}"}
            await http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    tenants = [request[3] for request in engine.requests.values()]
    assert tenants[0] == tenants[2] != tenants[1] and all(tenants)


# hosts and origins


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
async def test_rebound_host_names_are_refused(host: str, status: int) -> None:
    async with guarded() as http:
        for path in ("/v1/models", "/health"):
            assert (await http.get(path, headers={"host": host})).status_code == status


async def test_allowed_hosts() -> None:
    async with guarded(allowed_hosts="llm.example, other", api_key="sesame") as http:
        for host, status in (("llm.example", 200), ("LLM.example:80", 200), ("evil.example", 403)):
            reply = await http.get("/v1/models", headers={**SESAME, "host": host})
            assert reply.status_code == status
    async with guarded(allowed_hosts="*") as http:
        reply = await http.get("/v1/models", headers={"host": "evil.example"})
        assert reply.status_code == 200


async def test_other_origins_are_refused() -> None:
    async with guarded(allowed_origins="https://app.example") as http:
        for origin, status in (
            ("https://evil.example", 403),
            ("null", 403),
            ("http://localhost:9", 403),
            ("http://localhost", 200),
            ("https://app.example", 200),
        ):
            reply = await http.get("/v1/models", headers={"origin": origin})
            assert reply.status_code == status, origin
            allowed = reply.headers.get("access-control-allow-origin")
            assert allowed == (origin if origin == "https://app.example" else None)
        request = {"origin": "https://app.example", "access-control-request-method": "POST"}
        preflight = await http.options(COMPLETIONS, headers=request)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        request["origin"] = "https://evil.example"
        assert (await http.options(COMPLETIONS, headers=request)).status_code == 403


async def test_cors_is_empty_by_default() -> None:
    async with guarded() as http:
        reply = await http.get("/v1/models", headers={"origin": "https://app.example"})
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


async def test_headers_are_limited() -> None:
    async with guarded() as http:
        many = {f"x-{i}": "1" for i in range(120)}
        assert (await http.get("/health", headers=many)).status_code == 431
        assert (await http.get("/health", headers={"x": "y" * 40_000})).status_code == 431
        assert (await http.get("/health?" + "q" * 40_000)).status_code == 431


# rate limits


async def test_requests_per_minute_are_limited() -> None:
    async with guarded(requests_per_minute=2) as http:
        replies = [await http.post(COMPLETIONS, json={"prompt": "x"}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
    assert replies[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert 1 <= int(replies[2].headers["retry-after"]) <= 30
    assert replies[2].json()["error"]["type"] == "RateLimitError"


async def test_output_tokens_are_charged_as_they_are_generated() -> None:
    async with guarded(tokens_per_minute=30) as http:
        body = {"prompt": "x" * 10, "max_tokens": 25}
        first, second = [await http.post(COMPLETIONS, json=body) for _ in range(2)]
    assert first.status_code == 200 and second.status_code == 429
    assert int(second.headers["retry-after"]) == 30  # 30 - 10 - 25 = -5: 15 more at one per 2 s
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"


def test_bucket_refills_evenly_and_a_large_request_waits_for_a_full_one() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.wait_s(1000, 0.0) == 0
    bucket.take(1000, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(941)
    assert bucket.level(940.0) == 0 and bucket.level(5000.0) == 60


async def test_keys_have_separate_budgets(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    (one, first), (two, second) = new_key("one"), new_key("two")
    file.write_text(f"{first}requests_per_minute = 1\n{second}")
    async with guarded(api_keys_file=str(file), requests_per_minute=100) as http:

        async def post_with(key: str) -> int:
            headers = {"x-api-key": key}
            return (await http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)).status_code

        assert [await post_with(key) for key in (one, one, two, two)] == [200, 429, 200, 200]


# addresses


def test_exposed_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(BadInput, match="--insecure"):
            check_exposed(ServerOptions(host=host))
        check_exposed(ServerOptions(host=host, api_key="k"))
        check_exposed(ServerOptions(host=host, insecure=True))
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        check_exposed(ServerOptions(host=host))


@pytest.mark.parametrize(
    "table",
    [
        {"slo_classes": "chat"},
        {"slo_classes": "chat=ttft:0"},
        {"slo_classes": "a=ttft:1;a=ttft:2"},
        {"default_slo_class": "gold"},
        {"requests_per_minute": 0},
        {"price_per_hour": -1.0},
        {"header_timeout_s": -1.0},
        {"admin_port": 70000},
    ],
)
def test_bad_options_are_refused(table: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        ServerOptions(**table)


# administrators


async def test_admin_routes_need_the_admin_listener_and_an_admin_key(tmp_path: Path) -> None:
    file, engine = tmp_path / "keys.toml", FakeEngine()
    (user, first), (admin_key, second) = new_key("user"), new_key("boss")
    file.write_text(f"{first}{second}admin = true\n")
    app = create_app(engine, ServerOptions(api_keys_file=str(file)))
    service = app.state.service
    as_admin, as_user = {"x-api-key": admin_key}, {"x-api-key": user}
    async with client_of(app) as http, client_of(create_admin_app(service)) as admin:
        for headers in (as_admin, as_user):
            assert (await http.get("/admin/state", headers=headers)).status_code == 404
        assert (await admin.get("/admin/state", headers=as_user)).status_code == 403
        assert (await admin.get("/admin/state")).status_code == 401
        state = (await admin.get("/admin/state", headers=as_admin)).json()
        assert state["settings"] == {"enable_prefix_caching": True}
        assert (await admin.post("/admin/abort/cmpl-1", headers=as_admin)).status_code == 200
        assert engine.aborted == ["cmpl-1"]
        assert (await admin.post("/admin/drain", headers=as_admin)).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        refused = await http.post(COMPLETIONS, json={"prompt": "x"}, headers=as_user)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_key_name_has_a_limited_length(name: str) -> None:
    with pytest.raises(BadInput, match="1 to 100"):
        new_key(name)
    assert new_key("x" * 100)[0].startswith("rl-")
