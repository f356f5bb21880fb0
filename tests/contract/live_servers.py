"""Running servers, and plain HTTP to them."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.engines.sglang.process import STANDINS, ServerProcess, find_free_port

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Server:
    """A running server and plain HTTP to it."""

    kind: str
    url: str
    process: ServerProcess

    def call(
        self, path: str, body: object = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and answer, decoded where it is JSON. ``body`` may be raw bytes."""
        status, content = self.raw(path, body, method=method, headers=headers)
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode()

    def raw(
        self, path: str, body: object = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if data is None else "POST")
        headers = ({} if data is None else {"Content-Type": "application/json"}) | (headers or {})
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ok(self, path: str, body: object = None, **kwargs: Any) -> Any:
        status, answer = self.call(path, body, **kwargs)
        assert status == 200, (path, status, answer)
        return answer

    def generate(self, prompt: list[int], *, body: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """Greedy, eight tokens, with logprobs, unless told otherwise."""
        params = {"temperature": 0, "max_new_tokens": 8} | sampling
        return self.ok(
            "/generate", {"input_ids": prompt, "sampling_params": params, "return_logprob": True} | (body or {})
        )

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Events of a stream; it must end with [DONE]."""
        status, content = self.raw(path, body | {"stream": True})
        assert status == 200
        events = content.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call in a thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def start_long(self, prompt: list[int], request_id: str, num_tokens: int = 1900) -> Future[Any]:
        """A long greedy request, returned once the server runs it."""
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
        future = self.start(self.generate, prompt, body={"rid": request_id}, **sampling)
        time.sleep(0.03)
        self.generate([5], max_new_tokens=1)  # behind it in the queue
        assert not future.done(), "too fast to be caught running"
        return future


def start_server(kind: str, model_path: Path, log_dir: Path, name: str = "", flags: tuple[str, ...] = ()) -> Server:
    """Start one server; does not wait."""
    port = find_free_port()
    words = ["--model-path", str(model_path), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *flags]
    # Bytecode is kept where the caller forbids it: three SGLang processes compiling all they import take a minute more.
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    if kind == "embedded":
        command = [sys.executable, "-m", "rlrecipes.engines.embedded.server", *words]
    else:
        python = os.environ.get("RLRECIPES_SGLANG_PYTHON", str(REPOSITORY / ".venv-sglang/bin/python"))
        assert Path(python).exists(), f"{python} is missing: `make test` installs it"
        command = [
            python,
            "-m",
            "sglang.launch_server",
            *words,
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
        ]
        command += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"]
        # Without --sleep-on-idle it spins on a core while other tests run.
        command += ["--skip-server-warmup", "--max-total-tokens", "16384", "--sleep-on-idle"]
        # Paused, it answers /health only when this is over; 20 s by default.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STANDINS), "SGLANG_HEALTH_CHECK_TIMEOUT": "2"}
    process = ServerProcess(name or kind, command, env, log_dir / f"{name or kind}.log")
    return Server(kind, f"http://127.0.0.1:{port}", process)
