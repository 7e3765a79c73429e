"""Starts a server, and runs stock clients of two other environments against it.

python tests/clients/run.py CLIENT_PYTHON
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
SERVER = (
    "serve", "demo", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--kv-cache-memory-bytes", str(64 << 20), "--port",
)  # fmt: skip


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit("the server ended before it was ready")
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server was not ready within a minute")


def main(client_python: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "ridgeline", *SERVER, str(port)])
    try:
        wait_until_ready(url, server)
        code = subprocess.call([client_python, str(HERE / "stock_clients.py"), url])
        java = shutil.which("java")
        if java is None:
            print("skipped Java's HttpClient: no java on the PATH (a JDK from 11 on runs it)")
            return code
        java_code = subprocess.call([java, str(HERE / "JdkClient.java"), url])
        print("ok      Java's HttpClient" if java_code == 0 else "FAILED  Java's HttpClient")
        return code or java_code
    finally:
        server.terminate()
        server.wait(timeout=30)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
