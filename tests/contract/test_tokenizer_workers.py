"""Why a rule refuses several tokenizer processes for a model that is updated: shown by the real SGLang."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_servers import start_server
from tiny_model import Reference


@pytest.mark.slow
def test_an_update_tells_one_of_them_the_weight_version(reference: Reference, tmp_path: Path) -> None:
    server = start_server("sglang", reference.path, tmp_path, "two", ("--tokenizer-worker-num", "2"))
    try:
        asyncio.run(server.process.wait_until_ready(server.url, 240.0))
        server.ok("/update_weights_from_disk", {"model_path": str(reference.path), "weight_version": "7"})

        def ask(_: int) -> str:
            version: str = server.generate(reference.prompt, max_new_tokens=2)["meta_info"]["weight_version"]
            return version

        with ThreadPoolExecutor(12) as pool:
            versions = Counter(pool.map(ask, range(200)))
        assert versions.keys() == {"7", "default"}, "SGLang has mended it: the rule can go"
    finally:
        server.process.stop(0.0)
