"""Programs that behave like kubectl, docker, Slurm's and Ray's, around one real HTTP server.

`python fake_tools.py NAME ARGS…` is the program NAME. Its state is state.json in the folder
FAKE_TOOLS; calls.jsonl there records every command line. The server's own arguments decide what
goes wrong: `--fail` exits at once, `--hang` never answers, `--no-image` and `--no-room` are a pod
that never starts; `--api-key KEY` refuses requests without it, `--crash-above N` ends the server in
the middle of a load if it has more slots. It has no metrics.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("FAKE_TOOLS", "."))
State = dict[str, Any]
STEP_S = float(
    os.environ.get("FAKE_STEP_S", "0.1")
)  # of the server's decode step, for any number of sequences
CRASH_AT = 60  # requests before a server that crashes under load does
MOST_SLOTS = 16  # more would need more CPU than a test should
FORWARDED: list[str] = []
"""The local port that a port-forward connects to a copy: its server listens there itself."""
STARTED: list[subprocess.Popen[bytes]] = []


class Answer:
    """A completion: one token in each step of `STEP_S`, the same for the same prompt."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.stream, self.number = bool(body.get("stream")), int(body.get("max_tokens", 1))
        prompt = body.get("prompt", "")
        self.tokens = [f" t{(len(prompt) + i) % 7}" for i in range(self.number)]
        self.usage = {"prompt_tokens": len(prompt), "completion_tokens": self.number}
        self.kind = "text/event-stream" if self.stream else "application/json"

    def parts(self) -> Iterator[bytes]:
        if not self.stream:
            time.sleep(STEP_S * self.number)
            text = "".join(self.tokens)
            tops = [{token: -0.1, " x": -2.5} for token in self.tokens]
            logprobs = {"tokens": self.tokens, "top_logprobs": tops}
            choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length"}
            yield json.dumps({"choices": [choice], "usage": self.usage}).encode()
            return
        for place, token in enumerate(self.tokens, 1):
            time.sleep(STEP_S)
            end = "length" if place == self.number else None
            row = {"choices": [{"index": 0, "text": token, "finish_reason": end}]}
            yield b"data: " + json.dumps(row).encode() + b"\n\n"
        yield b"data: " + json.dumps({"choices": [], "usage": self.usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


def argument(flag: str) -> str | None:
    """The value of a flag of this process."""
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else None


def serve_models() -> None:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Models(BaseHTTPRequestHandler):
        def is_refused(self) -> bool:
            key = argument("--api-key")
            if self.path.endswith("/metrics"):
                self.send_error(404)
            elif key is not None and self.headers["Authorization"] != f"Bearer {key}":
                self.send_error(401)
            else:
                return False
            return True

        def do_GET(self) -> None:
            if self.is_refused():
                return
            body = json.dumps({"data": [{"id": "m"}], "arguments": sys.argv[2:]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.is_refused():
                return
            if number > int(argument("--crash-above") or number) and next(streamed) >= CRASH_AT:
                print("torch.AcceleratorError: CUDA error: an illegal memory access", flush=True)
                os._exit(1)
            answer = Answer(body)
            self.send_response(200)
            self.send_header("Content-Type", answer.kind)
            self.end_headers()
            with slots:
                for part in answer.parts():
                    self.wfile.write(part)

        def log_message(self, *args: object) -> None: ...

    print("arguments", sys.argv[2:], flush=True)
    if "--fail" in sys.argv:
        sys.exit("ValueError: no such weights")
    if "--hang" in sys.argv:
        time.sleep(60)
    port = int(argument("--port") or 0)
    number = min(int(argument("--max-num-seqs") or MOST_SLOTS), MOST_SLOTS)
    slots, streamed = threading.Semaphore(number), count()
    ThreadingHTTPServer(("127.0.0.1", port), Models).serve_forever()


def launch(words: list[str], log: Path | None = None) -> int:
    """Start the server with the arguments of a command line, and return its process id."""
    if FORWARDED:
        place = words.index("--port") + 1
        words = [*words[:place], *FORWARDED, *words[place + 1 :]]
    log = log or FOLDER / "server.log"
    command = [sys.executable, "-IS", __file__, "server", *words[words.index("m") + 1 :]]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    STARTED.append(process)  # a Popen that is collected while its process runs warns
    with (FOLDER / "pids").open("a") as pids:
        print(process.pid, file=pids)
    time.sleep(0.15 if "--fail" in words else 0)
    return process.pid


def alive(pid: int | None) -> bool:
    if pid is None:
        return False
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    return False


def kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        while alive(pid):
            time.sleep(0.01)


# ---- kubectl -----------------------------------------------------------------------------------


def kubectl(state: State, words: list[str]) -> str:
    assert words[:2] == ["--namespace", "prod"], words
    verb, *rest = words[2:]
    if any("-ridgeline" in word for word in rest) or verb == "apply":
        FORWARDED[:] = [str(state["forwarded"])] if "forwarded" in state else []
    if any("chat-ridgeline" in word for word in rest) or "ridgeline/copy-of=chat" in rest:
        return kubectl_copy(state, verb, rest, words)
    if verb == "apply":
        text = Path(rest[rest.index("--filename") + 1]).read_text()
        return apply_copy(state, *map(json.loads, text.splitlines()))
    workload = state["workload"]
    if verb == "get" and rest[0] in ("deployment", "statefulset"):
        if rest[1] != workload["metadata"]["name"]:
            sys.exit(f'Error from server (NotFound): deployments.apps "{rest[1]}" not found')
        return json.dumps({**workload, "status": rollout_status(state)})
    if verb == "get" and rest[0] == "pods":
        assert rest[rest.index("-l") + 1] == "app=chat"
        return json.dumps({"items": [pod(state, row) for row in state["pods"]]})
    if verb == "patch":
        return patch(state, json.loads(rest[rest.index("--patch") + 1]))
    if verb == "logs":
        if "--previous" in rest and not state["pods"][-1]["ended"]:
            sys.exit("Error from server (BadRequest): previous terminated container not found")
        return (FOLDER / "server.log").read_text()
    sys.exit(f"error: unknown command {verb}")


def kubectl_copy(state: State, verb: str, rest: list[str], words: list[str]) -> str:
    copy = state.get("copy")
    if verb == "port-forward":
        time.sleep(60)  # the copy listens on the local port itself
    if copy is None and verb in ("get", "delete") and "--ignore-not-found" in rest:
        return ""
    if copy is None:
        sys.exit("Error from server (NotFound): not found")
    if verb == "delete":
        kill(copy["pid"])
        state["copy"] = None
        return "deleted"
    if verb == "get" and rest[0] == "deployment":
        return json.dumps({**copy["workload"], "status": rollout_status(copy)})
    if verb == "get":
        return json.dumps({"items": [pod(copy, row) for row in copy["pods"]]})
    if verb == "patch":
        return patch(copy, json.loads(rest[rest.index("--patch") + 1]))
    return (FOLDER / "server.log").read_text()


def apply_copy(state: State, deployment: State, service: State) -> str:
    """Start the copy; its Service is kept for the test."""
    deployment["metadata"]["generation"] = 1
    container = deployment["spec"]["template"]["spec"]["containers"][-1]
    row = {"name": "copy-0", "container": container, "ready": True, "stuck": "", "ended": False}
    words = server_words(container)
    state["copy"] = {
        "workload": deployment,
        "service": service,
        "pods": [row],
        "pid": launch(words),
        "calls": [],
    }
    return "serverside-applied"


def containers(state: State) -> list[dict[str, Any]]:
    return list(state["workload"]["spec"]["template"]["spec"]["containers"])


def server_words(container: dict[str, Any]) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


def patch(state: State, operations: list[dict[str, Any]]) -> str:
    for row in operations:
        *parents, last = row["path"].strip("/").split("/")
        place: Any = state["workload"]
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        if row["op"] == "test" and place[last] != row["value"]:
            sys.exit("error: the server rejected our request: testing value failed")
        if row["op"] == "replace":
            place[last] = row["value"]
    return roll_out(state)


def roll_out(state: State) -> str:
    """What a cluster does when a Deployment's containers have changed."""
    state["workload"]["metadata"]["generation"] += 1
    container = containers(state)[-1]
    words = server_words(container)
    new = {"name": f"chat-{len(state['calls'])}", "container": container, "ended": False}
    state["pods"] = [row for row in state["pods"] if row["ready"]]
    stuck = [flag for flag in ("--no-image", "--no-room") if flag in words]
    if stuck:
        state["pods"].append({**new, "ready": False, "stuck": stuck[0]})
        return "patched"
    if "--fail" in words or "--hang" in words:
        pid = launch(words)  # next to the old pod, which keeps serving
        ended = not alive(pid)
        state["pods"].append({**new, "ready": False, "stuck": "", "ended": ended})
        return "patched"
    kill(state["pid"])
    state["pid"] = launch(words)
    state["pods"] = [{**new, "ready": True, "stuck": ""}]
    return "patched"


def rollout_status(state: State) -> dict[str, Any]:
    wanted = server_words(containers(state)[-1])
    updated = [row for row in state["pods"] if server_words(row["container"]) == wanted]
    return {
        "observedGeneration": state["workload"]["metadata"]["generation"],
        "replicas": len(state["pods"]),
        "updatedReplicas": len(updated),
        "availableReplicas": sum(row["ready"] for row in state["pods"]),
    }


def pod(state: State, row: dict[str, Any]) -> dict[str, Any]:
    name = row["container"]["name"]
    status: dict[str, Any] = {"name": name, "restartCount": 0, "state": {"running": {}}}
    conditions = []
    if row["stuck"] == "--no-image":
        message = 'Back-off pulling image "vllm/vllm-openai:nope"'
        status["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
    if row["stuck"] == "--no-room":
        message = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
        conditions.append(
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
        )
    if row["ended"]:
        ended = {"terminated": {"exitCode": 1, "reason": "Error"}}
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        status |= {"restartCount": 1, "state": waiting, "lastState": ended}
    return {
        "metadata": {"name": row["name"], "uid": row["name"]},
        "spec": {"containers": [row["container"]]},
        "status": {"containerStatuses": [status], "conditions": conditions},
    }


# ---- docker ------------------------------------------------------------------------------------


def docker(state: State, words: list[str]) -> str:
    verb, *rest = words
    rows = state["containers"]
    name = rest[-1]
    if verb == "inspect" and rest[1] == "image":
        return json.dumps([state["image"]])
    if verb == "run":
        return docker_run(state, rest)
    if name not in rows:
        sys.exit(f"Error: No such container: {name}")
    row = rows[name]
    if verb == "inspect":
        up = alive(row["pid"])
        status = {"Running": up, "Status": "running" if up else "exited", "ExitCode": 1}
        return json.dumps([{**row["document"], "State": status}])
    if verb == "logs":
        print((FOLDER / "server.log").read_text(), file=sys.stderr)
        return ""
    if verb == "start":
        row["pid"] = launch(row["words"])
    elif verb in ("stop", "rm"):
        kill(row["pid"])
        if verb == "rm":
            del rows[name]
    return name


def docker_run(state: State, rest: list[str]) -> str:
    if "--rm" in rest:
        return "" if "chmod" in rest else sys.exit("only chmod ends at once")
    image = state["image"]["RepoTags"][0]
    options, arguments = rest[: rest.index(image)], rest[rest.index(image) + 1 :]
    name = options[options.index("--name") + 1]
    if name in state["containers"]:
        sys.exit(f'Error: The container name "/{name}" is already in use.')
    environment = [f"{key}={os.environ[key]}" for flag, key in pairwise(options) if flag == "--env"]
    key, _, value = options[options.index("--label") + 1].partition("=")
    config = {"Image": image, "Cmd": arguments, "Env": environment, "Labels": {key: value}}
    words = [*state["image"]["Config"]["Entrypoint"], *arguments]
    state["containers"][name] = {
        "document": {"Config": config, "HostConfig": {}, "Image": "sha256:1"},
        "options": options,
        "words": words,
        "pid": launch(words),
    }
    return "0123456789ab"


# ---- slurm -------------------------------------------------------------------------------------


def sbatch(state: State, words: list[str]) -> str:
    number = str(len(state["jobs"]) + 41)
    script = Path(words[-1]).read_text()
    line = next(row for row in script.splitlines() if " m " in f"{row} ")
    waits = "--no-room" in line
    pid = None if waits else launch(line.split(), Path(words[words.index("--output") + 1]))
    state["jobs"][number] = {"pid": pid, "waits": waits, "script": script}
    return f"{number};cluster"


def squeue(state: State, words: list[str]) -> str:
    job = state["jobs"].get(words[words.index("--jobs") + 1])
    if job is not None and job["waits"]:
        return "PENDING|Resources|"
    if job is None or not alive(job["pid"]):
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    return "RUNNING|None|127.0.0.1"


def scancel(state: State, words: list[str]) -> str:
    for number in words:
        kill(state["jobs"][number]["pid"])
        state["jobs"][number] |= {"cancelled": True, "waits": False}
    return ""


# ---- ray ---------------------------------------------------------------------------------------


def serve(state: State, words: list[str]) -> str:
    if words == ["status"]:
        return json.dumps({"applications": {"llm": state["application"]}})
    document = json.loads(Path(words[1]).read_text())
    arguments = document["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]
    line = ["m", "--port", str(state["port"])]
    for key, value in arguments.items():
        line += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    if "--fail" in line:
        state["application"] = {"status": "DEPLOY_FAILED", "message": "engine died: no weights"}
        return "Sent deploy request successfully."
    kill(state["pid"])
    state |= {"pid": launch(line), "application": {"status": "RUNNING", "message": ""}}
    return "Sent deploy request successfully."


TOOLS: dict[str, Callable[[State, list[str]], str]] = {
    "kubectl": kubectl,
    "docker": docker,
    "sbatch": sbatch,
    "squeue": squeue,
    "scancel": scancel,
    "serve": serve,
}


def main() -> None:
    name, *words = sys.argv[1:]
    if name == "server":
        serve_models()
    file = FOLDER / "state.json"
    state = json.loads(file.read_text())
    state["calls"] = [*state.get("calls", []), [name, *words]]
    write_state(file, state)
    try:
        print(TOOLS[name](state, words))
    finally:
        write_state(file, state)


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Replace the file at once: another tool may read it at any moment."""
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(state))
    written.replace(file)


if __name__ == "__main__":
    main()
