"""Speculative decoding: what each of SGLang's algorithms needs beside its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.rules.rule import GROUP, Found, list_groups, rule
from rlrecipes.suggest import did_you_mean

_ALGORITHMS = ("DFLASH", "DSPARK", "EAGLE", "EAGLE3", "FROZEN_KV_MTP", "NEXTN", "NGRAM", "STANDALONE")
_NEED_A_DRAFT = ("DFLASH", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE")
_USE_PREDICTION_LAYERS = ("EAGLE", "NEXTN")
_FAMILIES_WITH_PREDICTION_LAYERS = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "mimo",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)
"""Whose checkpoints SGLang loads once more as their own draft model."""
_COUNTS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
_ALGORITHM, _DRAFT = "speculative_algorithm", "speculative_draft_model_path"


def _read_algorithm(native: Mapping[str, Any]) -> str | None:
    value = native.get(_ALGORITHM)
    return value.upper() if isinstance(value, str) else None


def _list_speculating(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """Path, options and algorithm of the groups whose options say anything of speculative decoding."""
    for where, _, group in list_groups(config):
        if group.engine == "sglang" and any(name.startswith("speculative_") for name in group.sglang):
            yield f"{where}.sglang", group.sglang, _read_algorithm(group.sglang)


@rule(f"{GROUP}.sglang.{_ALGORITHM}", fix="name one of SGLang's algorithms")
def speculative_algorithm_is_known(config: RunConfig) -> Iterator[Found]:
    """SGLang's command line takes any word here and refuses it once the engine has started."""
    for where, _, algorithm in _list_speculating(config):
        if algorithm is not None and algorithm not in _ALGORITHMS:
            yield Found(f"{where}.{_ALGORITHM}", f"is {algorithm!r}", did_you_mean(algorithm, _ALGORITHMS))


@rule(f"{GROUP}.sglang.<name>", fix=f"set {_ALGORITHM}, or remove it")
def speculation_has_an_algorithm(config: RunConfig) -> Iterator[Found]:
    """Without an algorithm no other option of speculative decoding is read."""
    for where, native, algorithm in _list_speculating(config):
        for name in native:
            if algorithm is None and name.startswith("speculative_") and name != _ALGORITHM:
                yield Found(f"{where}.{name}", f"is given, but {_ALGORITHM} is not")


@rule(f"{GROUP}.sglang.{_ALGORITHM}", fix=f"give {_DRAFT}")
def speculation_has_a_draft(config: RunConfig) -> Iterator[Found]:
    """Tokens are drafted by a model of their own, or by the prediction layers of a family that has some."""
    for where, native, algorithm in _list_speculating(config):
        own = algorithm in _USE_PREDICTION_LAYERS and config.model.family in _FAMILIES_WITH_PREDICTION_LAYERS
        needs = algorithm in (*_NEED_A_DRAFT, *_USE_PREDICTION_LAYERS)
        if needs and not own and not native.get(_DRAFT) and not native.get("speculative_draft_model"):
            why = " and checkpoints of this family hold no prediction layers" if algorithm not in _NEED_A_DRAFT else ""
            yield Found(f"{where}.{_ALGORITHM}", f"{algorithm} drafts with a model; none is given{why}")


@rule(f"{GROUP}.sglang.<name>", fix=f"give {', '.join(_COUNTS)} together, or none of them")
def speculation_counts_come_together(config: RunConfig) -> Iterator[Found]:
    """SGLang chooses steps, branches and tokens of a draft together, or takes all three."""
    for where, native, algorithm in _list_speculating(config):
        given = [name for name in _COUNTS if native.get(name) is not None]
        is_eagle = algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
        if is_eagle and not native.get("speculative_adaptive") and 0 < len(given) < len(_COUNTS):
            missing = [name for name in _COUNTS if name not in given]
            yield Found(f"{where}.{given[0]}", f"is given without {' and '.join(missing)}")


@rule(f"{GROUP}.sglang.{_ALGORITHM}", fix="use pipeline_parallel_size=1, or no speculative decoding")
def speculation_has_no_pipeline(config: RunConfig) -> Iterator[Found]:
    """SGLang drafts and verifies in one process group, not over pipeline stages."""
    groups = {f"{where}.sglang": group for where, _, group in list_groups(config)}
    for where, _, algorithm in _list_speculating(config):
        if algorithm is not None and groups[where].pipeline_parallel_size > 1:
            yield Found(f"{where}.{_ALGORITHM}", f"the engine has {groups[where].pipeline_parallel_size} stages")


RULES = (
    speculative_algorithm_is_known,
    speculation_has_an_algorithm,
    speculation_has_a_draft,
    speculation_counts_come_together,
    speculation_has_no_pipeline,
)
