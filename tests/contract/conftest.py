"""One tiny model, and the two servers that must answer alike over it: the embedded one and the real SGLang on CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from live_servers import Server, start_server
from safetensors.torch import save_file
from tiny_model import Reference, build_model, build_tokenizer, build_weights

_START_TIMEOUT_S = 240.0


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    return Reference(build_model(path), build_tokenizer(), path)


@pytest.fixture(scope="session")
def other_model(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory like the model's with other weights, and these weights."""
    path = tmp_path_factory.mktemp("other")
    for file in reference.path.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    weights = build_weights(reference, seed=7)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path, weights


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """The embedded one, and the real one where a selected test asks for it: it needs most of a minute to start."""
    asked = {item.callspec.params.get("server") for item in request.session.items if hasattr(item, "callspec")}
    log_dir = tmp_path_factory.mktemp("logs")
    kinds = ("sglang", "embedded") if "sglang" in asked else ("embedded",)
    started = {kind: start_server(kind, reference.path, log_dir) for kind in kinds}
    yield started
    family = [
        child for server in started.values() for child in psutil.Process(server.process.pid).children(recursive=True)
    ]
    for server in started.values():
        server.process.stop(0.0)
    assert not psutil.wait_procs(family, timeout=10)[1], "a server's own processes outlived it"


@pytest.fixture(scope="session", params=["embedded", "sglang"])
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    started = servers[request.param]
    asyncio.run(started.process.wait_until_ready(started.url, _START_TIMEOUT_S))
    return started


@pytest.fixture
def restored(server: Server, reference: Reference) -> Iterator[Server]:
    """The server, made as it was afterwards: running, with its first weights, an empty cache and no request."""
    yield server
    server.ok("/continue_generation", {})
    server.ok("/abort_request", {"abort_all": True})
    body = {"model_path": str(reference.path), "weight_version": "default", "flush_cache": False}
    server.ok("/update_weights_from_disk", body)
    server.ok("/flush_cache?timeout=10", {})


@pytest.fixture
def flushed(server: Server) -> Server:
    server.ok("/flush_cache?timeout=10", {})
    return server
