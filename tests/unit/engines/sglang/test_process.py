"""Servers end when they should, with all they started, and say why they did not start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from rlrecipes.engines.sglang import process as process_module
from rlrecipes.engines.sglang.process import ServerProcess, find_free_port, read_log_tail, wait_until_workers
from rlrecipes.errors import EngineError

# A server as SGLang is one: a process that starts another, which computes.
FAMILY = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(15, lambda *_: 0)\\nwhile 1: time.sleep(9)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("child", child.pid, flush=True)
time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
HTTP = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"workers": []}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def launch(tmp_path: Path, code: str, *words: str) -> ServerProcess:
    return ServerProcess(
        "probe", [sys.executable, "-c", code, *words], dict(os.environ), tmp_path / "logs" / "probe.log"
    )


def wait_for(condition: object, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def family_of(process: ServerProcess) -> list[psutil.Process]:
    wait_for(lambda: "child" in read_log_tail(process.log_path), "the server did not start its child")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    return family


def assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_stop_ends_grandchildren_that_ignore_it(tmp_path: Path) -> None:
    process = launch(tmp_path, FAMILY)
    family = family_of(process)
    process.stop()
    assert_gone(family)
    assert process.poll() == 128 + signal.SIGTERM
    process.stop()  # again is harmless


def test_where_the_parent_blocks_it_a_server_is_deaf_to_what_a_scheduler_sends_to_all(tmp_path: Path) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = launch(tmp_path, FAMILY)
        family = family_of(process)
        for one in (psutil.Process(process.pid), family[0]):
            one.terminate()
        time.sleep(0.2)
        assert process.poll() is None and family[0].is_running()
        process.stop(grace_s=600)  # which would be waited for in vain
        assert_gone(family)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_stop_kills_after_the_grace(tmp_path: Path) -> None:
    process = launch(tmp_path, STUBBORN)
    wait_for(lambda: "up" in read_log_tail(process.log_path), "it did not start")
    process.stop(grace_s=0.2)
    assert process.poll() == 128 + signal.SIGKILL


def test_a_server_that_dies_takes_its_children_along(tmp_path: Path) -> None:
    process = launch(tmp_path, FAMILY)
    family = family_of(process)
    family[0].kill()
    assert_gone(family)
    with pytest.raises(EngineError, match="ended with exit code 137"):
        wait_for(lambda: process.check_alive(), "its end was not noticed")


def test_nothing_outlives_a_parent_killed_without_warning(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from rlrecipes.engines.sglang.process import ServerProcess\n"
        f"command, log = [sys.executable, '-c', {FAMILY!r}], Path({str(tmp_path / 'log')!r})\n"
        "process = ServerProcess('probe', command, dict(os.environ), log)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: "child" in read_log_tail(tmp_path / "log"), "the server did not start")
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) == 3  # the guard, the server and its child
    parent.kill()
    parent.wait()
    assert_gone(family)


def test_ready_and_workers(tmp_path: Path) -> None:
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    process = launch(tmp_path, HTTP, "--port", str(port))
    asyncio.run(process.wait_until_ready(url, 20))
    process.check_alive()
    with pytest.raises(EngineError, match="did not find these engines healthy within 0.2 s: http://b"):
        asyncio.run(wait_until_workers(url, ["http://b"], 0.2))
    process.stop()


def test_a_chosen_port_is_given_to_nobody_who_asks_for_just_any() -> None:
    chosen = [find_free_port() for _ in range(300)]
    assert len(set(chosen)) == len(chosen)
    with ExitStack() as stack:
        for _ in range(300):
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            assert taken.getsockname()[1] not in chosen
        for port in chosen:
            server = stack.enter_context(socket.socket())
            with pytest.raises(OSError, match="in use"):
                server.bind(("", port))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            server.bind(("", port))
            server.listen()


def test_a_port_is_found_where_the_kernel_gives_away_all_of_them(tmp_path: Path, monkeypatch) -> None:
    everything = tmp_path / "range"
    everything.write_text("1024\t65535\n")
    for path in (everything, tmp_path / "missing"):
        monkeypatch.setattr(process_module, "_EPHEMERAL_RANGE", path)
        chosen = [find_free_port() for _ in range(100)]
        assert len(set(chosen)) == len(chosen)


def test_a_port_that_is_taken_is_named_with_its_owner(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} is taken by process {os.getpid()}"):
            launch(tmp_path, HTTP, "--port", str(port))


def ready_error(process: ServerProcess, timeout_s: float = 20) -> str:
    with pytest.raises(EngineError) as caught:
        asyncio.run(process.wait_until_ready(f"http://127.0.0.1:{find_free_port()}", timeout_s))
    assert process.poll() is not None
    return str(caught.value)


def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "probe.log"
    log.parent.mkdir()
    log.write_text("of an earlier run\n")
    code = (
        "print('\\x1b[1mloading\\x1b[0m'); print('loading'); print(); raise ValueError('Unrecognized model in /tmp/x')"
    )
    message = ready_error(launch(tmp_path, code))
    assert "engine probe: ended with exit code 1" in message and str(log) in message
    assert message.count("loading") == 1 and "ValueError: Unrecognized model" in message
    assert "earlier run" not in message and "File" not in message and "\x1b" not in message
    assert "fix: give the path of a directory that holds config.json" in message


@pytest.mark.parametrize(("says", "fix"), [("loading", "it was killed"), ("SIGQUIT received.", "read ")])
def test_a_killed_server_is_not_one_that_ended_itself_so(tmp_path: Path, says: str, fix: str) -> None:
    code = f"import os; print({says!r}, flush=True); os.kill(os.getpid(), 9)"
    assert f"fix: {fix}" in ready_error(launch(tmp_path, code))


@pytest.mark.parametrize(
    ("says", "fix"),
    [
        ("OSError: [Errno 98] error while attempting to bind: address already in use", "its port was taken"),
        ("ModuleNotFoundError: No module named 'sglang'", "this interpreter has no SGLang"),
        ("server: error: unrecognized arguments: --x", "correct the option"),
        ("[torch_memory_saver.cpp] CUresult error: 2 out of memory  file=core.cpp", "give the engine's KV cache less"),
        ("torch_memory_saver: cuMemCreate CUDA_ERROR_OUT_OF_MEMORY", "give the engine's KV cache less memory"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "its KV cache has no room"),
        ("Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT", "it was killed"),
        ("something else", "read "),
    ],
)
def test_known_causes_have_a_fix(tmp_path: Path, says: str, fix: str) -> None:
    assert f"fix: {fix}" in ready_error(launch(tmp_path, f"import sys; sys.exit({says!r})"))


def test_a_missing_interpreter_is_said(tmp_path: Path) -> None:
    process = ServerProcess("probe", ["/no/such/python"], dict(os.environ), tmp_path / "log")
    message = ready_error(process)
    assert (
        "exit code 127" in message and "cannot start /no/such/python" in message and "existing interpreter" in message
    )


def test_a_server_that_does_not_answer_in_time_is_stopped(tmp_path: Path) -> None:
    process = launch(tmp_path, STUBBORN)
    assert "did not answer" in ready_error(process, 0.5) and process.poll() is not None
