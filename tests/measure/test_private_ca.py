"""Servers behind https whose certificate is of a private authority: SSL_CERT_FILE names it."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shutil import which

import pytest

from ridgeline.errors import RidgelineError
from ridgeline.measure.client.http_target import first_model
from ridgeline.workflows.load.live_traffic import read_traffic

PAGES = {
    "/v1/models": b'{"data": [{"id": "private"}]}',
    "/metrics": b"vllm:request_success_total 5\n",
}


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = PAGES[self.path]
        self.send_response(200)
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if which("openssl") is None:
        pytest.skip("openssl is not installed")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    words += " -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    made = subprocess.run(
        [*words.split(), "-keyout", "key.pem", "-out", "ca.pem"], cwd=tmp_path, capture_output=True
    )
    assert made.returncode == 0, made.stderr
    return tmp_path / "ca.pem"


@pytest.fixture
def url(certificate: Path) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Pages)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_private_authority_is_trusted_where_the_environment_names_it(
    url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(RidgelineError, match=r"(?i)certificate"):
        asyncio.run(first_model(url))
    with pytest.raises(RidgelineError, match=r"(?i)certificate"):
        read_traffic(url, None, 0.0)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert asyncio.run(first_model(url)) == "private"
    assert read_traffic(url, None, 0.0) is not None
