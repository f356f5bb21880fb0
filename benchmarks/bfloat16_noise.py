"""How far bfloat16 alone moves a model's log probabilities: transformers in bfloat16 against transformers in float32.

    python benchmarks/bfloat16_noise.py --model DIR [--prompts 64] [--new-tokens 8]

One library, one order of operations, one machine: what is left is rounding. Answers are sampled in float32 at
temperature 1 from the prompts of ``recipe=smollm2_135m_reasoning``; then both precisions say how likely each sampled
token was, once with the output layer in float32 and once with everything in bfloat16.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = Path(__file__).parents[1] / "conf" / "recipe" / "smollm2_135m_reasoning.yaml"


def build_prompts(count: int) -> list[str]:
    """Sums and differences of two numbers, as the recipe asks them."""
    template = yaml.safe_load(RECIPE.read_text())["data"]["tasks"]["prompt_template"]
    draw = random.Random(0)
    pairs = [(draw.randrange(10 ** draw.randint(1, 2)), draw.randrange(10 ** draw.randint(1, 2))) for _ in range(count)]
    return [template.format(expression=f"{left} {draw.choice('+-')} {right}") for left, right in pairs]


def compute_logprobs(model: torch.nn.Module, ids: Tensor, mask: Tensor, first: int, *, is_head_float32: bool) -> Tensor:
    """[N, T] nats of the tokens from ``first`` on."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state[
        :, first - 1 : -1
    ]
    weight = model.lm_head.weight
    logits = hidden.float() @ weight.float().t() if is_head_float32 else (hidden @ weight.t()).float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, first:, None]).squeeze(2)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="HF directory")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=8)
    asked = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    inputs = tokenizer(build_prompts(asked.prompts), return_tensors="pt", padding=True)
    first = inputs["input_ids"].shape[1]
    sizes = {"max_new_tokens": asked.new_tokens, "min_new_tokens": asked.new_tokens}
    ids = model.generate(**inputs, **sizes, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, first:])], 1)
    exact = compute_logprobs(model, ids, mask, first, is_head_float32=True)
    model.to(torch.bfloat16)
    print(f"{exact.numel()} sampled tokens, {-exact.mean():.2f} nats each")
    print("\n| bfloat16 against float32, nats | mean | median | 99% | largest |\n|---|---|---|---|---|")
    for name, is_head_float32 in (("all but the output layer", True), ("everything", False)):
        found = compute_logprobs(model, ids, mask, first, is_head_float32=is_head_float32)
        distance = (found - exact).abs().flatten()
        median, high = distance.quantile(torch.tensor([0.5, 0.99])).tolist()
        print(f"| {name} | {distance.mean():.4f} | {median:.4f} | {high:.3f} | {distance.max():.3f} |")


if __name__ == "__main__":
    main()
