"""A reward head on the real SGLang, asked through the router; the embedded engine has none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from live_servers import start_server
from test_router import start_router
from tiny_model import build_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlrecipes.engines.sglang.process import wait_until_workers
from rlrecipes.engines.sglang.serving import ServingClient

pytestmark = pytest.mark.xdist_group("serving")
_TIMEOUT_S = 240.0


def build_classifier(path: Path) -> LlamaForSequenceClassification:
    """A tiny random model. Llama's: SGLang 0.5.17 adds a random bias to Qwen's heads, which checkpoints have not."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        num_labels=1,
        dtype="float32",
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


@pytest.mark.slow
def test_a_reward_head_gives_what_transformers_computes(tmp_path: Path) -> None:
    model, tokenizer = build_classifier(tmp_path / "model"), build_tokenizer()
    texts = ["Hello NO", "x + y = 12", "a", "the quick brown fox " * 10]
    with torch.no_grad():
        expected = [float(model(torch.tensor([tokenizer(text).input_ids])).logits) for text in texts]

    async def ask(url: str) -> list[float]:
        async with ServingClient(url, timeout_s=60, max_connections=8) as client:
            calls = (client.classify(text=text, request_id=f"c-{index}.") for index, text in enumerate(texts))
            return await asyncio.gather(*calls)

    engine = start_server("sglang", tmp_path / "model", tmp_path, flags=("--is-embedding",))
    try:
        asyncio.run(engine.process.wait_until_ready(engine.url, _TIMEOUT_S))
        router = start_router([engine], tmp_path / "router.log", "cache_aware")
        try:
            asyncio.run(router.process.wait_until_ready(router.url, _TIMEOUT_S))
            asyncio.run(wait_until_workers(router.url, [engine.url], _TIMEOUT_S))
            assert asyncio.run(ask(router.url)) == pytest.approx(expected, abs=1e-5)
        finally:
            router.process.stop()
    finally:
        engine.process.stop(0.0)
