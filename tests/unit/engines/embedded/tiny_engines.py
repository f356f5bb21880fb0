"""Tiny models on disk, and a way to run requests through an engine without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlrecipes.engines.embedded.application import build_state
from rlrecipes.engines.embedded.arguments import parse_arguments
from rlrecipes.engines.embedded.bodies import GenerateBody

SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3-untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
}


def save_tokenizer(path: Path) -> None:
    """One token a printable ASCII character, after four special ones."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    fast.save_pretrained(path)


def save_model(path: Path, family: str = "qwen3-tied", seed: int = 0) -> Path:
    """Write a random model with biases and norms that are not at their start values."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def play(model_path: Path, bodies: Sequence[dict[str, Any]], *flags: str, delays: Sequence[float] = ()) -> list[Any]:
    """Run /generate bodies through one engine, all at once or after ``delays`` seconds; checks that no memory leaks.

    An exception of a body is its answer.
    """

    async def run() -> list[Any]:
        arguments = parse_arguments(["--model-path", str(model_path), "--max-total-tokens", "4096", *flags])
        torch.set_num_threads(1)
        state = build_state(arguments, asyncio.get_running_loop())
        state.scheduler.start()

        async def ask(body: dict[str, Any], delay: float) -> Any:
            await asyncio.sleep(delay)
            return await state.frontend.answer(GenerateBody(**body))

        waits = [ask(body, delay) for body, delay in zip(bodies, delays or [0.0] * len(bodies), strict=True)]
        answers = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 60)
        load = await asyncio.wrap_future(state.scheduler.run(state.scheduler.compute_load))
        assert load["num_used_tokens"] == 0, "slots leaked"
        assert await asyncio.wrap_future(state.scheduler.run(state.scheduler.flush))
        cache = state.scheduler._cache
        assert cache.num_free == cache.num_slots
        assert sorted(cache.take(cache.num_slots).tolist()) == list(range(1, cache.num_slots + 1))
        state.scheduler.stop()
        return list(answers)

    return asyncio.run(run())
