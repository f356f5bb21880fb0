"""A tiny random Qwen3 that servers load, and what transformers computes with it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CONTEXT_LENGTH = 2048
EOS = 2
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Reference:
    """The model as transformers computes it."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
        self.model, self.tokenizer, self.path = model, tokenizer, path
        self.prompt = self.encode("Hello NO")
        prompts = torch.tensor([[first, second, 40, 41] for first in range(10, 20) for second in range(20, 28)])
        answers = self.model.generate(prompts, max_new_tokens=60, do_sample=False, use_cache=True)[:, 4:].tolist()
        position, index = next((a.index(EOS), i) for i, a in enumerate(answers) if EOS in a[:-1] and a.index(EOS) > 3)
        self.eos_prompt: list[int] = prompts[index].tolist()
        self.eos_answer: list[int] = answers[index][: position + 1]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(ids) - 1, V]: row t is the distribution of token t + 1."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1]
        return torch.log_softmax(logits / temperature, dim=-1)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation; the end-of-sequence token does not end it."""
        ids = torch.tensor([prompt])
        answer = self.model.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
        return answer[0, len(prompt) :].tolist()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(specials + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def build_model(path: Path, *, seed: int = 0, is_tied: bool = False) -> Qwen3ForCausalLM:
    """A random Qwen3 with peaked enough logits that greedy is no lottery, saved with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


def build_weights(reference: Reference, seed: int) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes, norms included, under HF names."""
    generator = torch.Generator().manual_seed(seed)
    state = reference.model.state_dict()
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.dim() == 1)
        for name, tensor in state.items()
    }
