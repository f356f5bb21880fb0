"""Whatever is done to a recipe: no traceback, no unknown key accepted, no plan that breaks a rule.

10,000 cases; RLRECIPES_FUZZ_CASES=200000 runs more.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrecipes.config.compose import compose
from rlrecipes.config.validation import recipe_paths, validate
from rlrecipes.errors import ConfigError
from rlrecipes.plan.nodes import HostNode, Plan
from rlrecipes.plan.resolve import resolve
from rlrecipes.suggest import nearest

NUM_CASES = int(os.environ.get("RLRECIPES_FUZZ_CASES", "10000"))
URLS = "topology.served_models.policy.server_groups.main.urls=[http://there:30000]"
BASES = {
    "default": [],
    "sft": ["algo=sft"],
    "turns": ["rollout=multi_turn"],
    "ppo": ["algo=ppo", "parallel=tp2"],
    "dapo_pd": ["algo=dapo", "topology=pd", "cluster=h200_8"],
    "mixed": ["topology=mixed", "cluster=h100_8x2", "parallel.data_parallel_size=4"],
    "external": ["topology=external", URLS, "weight_sync=disk"],
    "qwen3_4b": ["recipe=qwen3_4b"],
    "glm4_9b": ["recipe=glm4_9b"],
    "qwen2_5_0_5b": ["recipe=qwen2_5_0_5b"],
}
OPEN = (
    "sglang",
    "router",
    "megatron",
    "env",
    "options",
    "policy_loss_options",
    "datasets",
    "served_models",
    "server_groups",
)
"""Sections whose keys are the user's or another package's."""
JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "0", "1e-4", "none", "module:function", "nan", "../x", "é\x00", "???", "${x}"])
    | st.lists(st.integers(-1, 3), max_size=2)
    | st.dictionaries(st.sampled_from(["a", "kind", "name"]), st.integers(-1, 3), max_size=2)
)
WAYS = ["typed"] * 10 + ["cross"] * 6 + ["scale"] * 4 + ["junk", "delete", "misspell", "unknown"]
COMPOSED = {}


@pytest.fixture(autouse=True)
def little_memory():
    """What lists something without end fails here with its traceback, not by the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def base_of(name):
    if name not in COMPOSED:
        recipe = compose(BASES[name])
        COMPOSED[name] = (recipe.config.model_dump_json(), recipe.origins)
    text, origins = COMPOSED[name]
    return json.loads(text), origins


def sections_of(data, path=()):
    yield path, data
    for key, value in data.items():
        if isinstance(value, dict):
            yield from sections_of(value, (*path, key))


def misspell(draw, key):
    position = draw(st.integers(0, len(key) - 1))
    return draw(
        st.sampled_from(
            [key[:position] + key[position + 1 :], key[:position] + key[position] + key[position:], key + "s"]
        )
    )


def like(value):
    """Another value of the same type, near the edges of its range."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16, 31, 64, 4096])
    if isinstance(value, float):
        return st.sampled_from([0.0, 1e-6, 0.2, 0.5, 1.0, 1.5, 10.0])
    return JUNK if value is None else st.just(value)


@st.composite
def broken(draw, name):
    """A recipe with one to four things done to it, and the unknown keys among them."""
    data, origins = base_of(name)
    unknown = []
    for _ in range(draw(st.integers(1, 4))):
        sections = [(path, section) for path, section in sections_of(data) if section]
        path, section = draw(st.sampled_from(sections))
        key = draw(st.sampled_from(sorted(section)))
        what = draw(st.sampled_from(WAYS))
        if what == "junk":
            section[key] = draw(JUNK)
        elif what == "typed":
            section[key] = draw(like(section[key]))
        elif what == "cross":
            other, _ = base_of(draw(st.sampled_from(sorted(BASES))))
            group = draw(st.sampled_from(["algo", "topology", "parallel", "schedule", "rollout", "data", "model"]))
            data[group] = other[group]
        elif what == "scale" and isinstance(section[key], (int, float)) and not isinstance(section[key], bool):
            section[key] = type(section[key])(section[key] * draw(st.sampled_from([0, 0.5, 2, 3, 16])))
        elif what == "delete":
            del section[key]
        elif what == "misspell" and key:
            section[misspell(draw, key)] = section.pop(key)
        elif what == "unknown":
            section["no_such_key"] = draw(JUNK)
            if not any(step in OPEN for step in path):
                unknown.append((*path, "no_such_key"))
    return data, origins, unknown


def is_there(data, path):
    for step in path:
        if not isinstance(data, dict) or step not in data:
            return False
        data = data[step]
    return True


def hosts_of(config):
    num_nodes, num_gpus = config.cluster.num_nodes or 1, max(config.cluster.gpus_per_node or 0, 0)
    return tuple(
        HostNode(name=f"n{number}", num_cpus=8, num_gpus=min(num_gpus, 16), memory_bytes=1 << 40)
        for number in range(min(num_nodes, 8))
    )


def check_told_well(problems):
    assert problems
    for problem in problems:
        assert problem.where.strip()
        assert problem.problem.strip()
        assert problem.fix.strip(), problem
        json.dumps(problem.where)


def check_keeps_the_rules(plan, config):
    """Rules of the table once more, written independently."""
    batch, trainer, shapes = plan.batch, plan.trainer, plan.model.shapes
    assert batch.prompts_per_train_step * batch.num_train_steps == batch.prompts_per_step
    assert batch.rollouts_per_step == batch.prompts_per_step * batch.group_size
    tp, pp, cp = (
        trainer.tensor_model_parallel_size,
        trainer.pipeline_model_parallel_size,
        trainer.context_parallel_size,
    )
    assert trainer.num_ranks == tp * pp * cp * trainer.data_parallel_size
    assert shapes.num_attention_heads % tp == 0
    assert shapes.num_attention_heads % (shapes.num_query_groups or shapes.num_attention_heads) == 0
    assert batch.max_sample_tokens <= shapes.max_position_embeddings
    assert batch.max_sample_tokens <= trainer.max_tokens_per_micro_batch * cp
    own, shared = list(trainer.devices), []
    for model in plan.served_models:
        kinds = {group.worker_type for group in model.server_groups}
        assert ("prefill" in kinds) == ("decode" in kinds)
        for group in model.server_groups:
            held = [
                device for engine in group.engines for part in (engine, *engine.followers) for device in part.devices
            ]
            (shared if group.placement == "colocated" else own).extend(held)
    for held in (own, shared + own[trainer.num_ranks :]):
        gpus = [(device.node, device.gpu) for device in held if device.gpu is not None]
        assert len(gpus) == len(set(gpus))
        assert all(0 <= gpu < plan.hosts[node].num_gpus for node, gpu in gpus)
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again.hash == plan.hash
    if config.algo.kind == "rl":
        assert config.algo.baseline == "none" or config.algo.group_size > 1
        assert (config.algo.critic is not None) == (config.algo.estimator == "gae")


@pytest.mark.parametrize("name", BASES)
def test_a_broken_recipe_is_refused_in_words_or_runs_by_the_rules(name):
    @settings(
        max_examples=NUM_CASES // len(BASES), deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(broken(name))
    def check(case):
        data, origins, unknown = case
        config, problems = validate(data, origins)
        for path in unknown:
            if is_there(data, path):
                assert config is None, f"{'.'.join(path)} was accepted"
        if config is None:
            check_told_well(problems)
            return
        try:
            plan = resolve(config, hosts_of(config), origins)
        except ConfigError as error:
            check_told_well(error.problems)
        else:
            check_keeps_the_rules(plan, config)

    check()


@pytest.mark.parametrize("name", ["default", "mixed"])
def test_a_number_beyond_all_measure_is_answered_without_listing_anything(name):
    """On CPUs, whose number bounds nothing, and on GPUs."""
    data, origins = base_of(name)
    numbers = [
        (section, key)
        for _, section in sections_of(data)
        for key, value in section.items()
        if value is None or (isinstance(value, int) and not isinstance(value, bool))
    ]
    for section, key in numbers:
        value = section[key]
        for absurd in (1 << 20, 10**15):
            section[key] = absurd
            config, problems = validate(data, origins)
            if config is None:
                check_told_well(problems)
                continue
            try:
                resolve(config, hosts_of(config), origins)
            except ConfigError as error:
                check_told_well(error.problems)
        section[key] = value


@settings(max_examples=NUM_CASES // 200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.data())
def test_overrides_of_a_command_line_end_the_same_way(data):
    """The same through Hydra: groups, ``k=``, ``+k=``, ``++k=``, ``~k``, and what no grammar knows."""
    name = data.draw(st.sampled_from(sorted(BASES)))
    paths = [path for path in recipe_paths(base_of(name)[0]) if "*" not in path]
    words = list(BASES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths))
        if data.draw(st.booleans()):
            path = misspell(data.draw, path)
        sign = data.draw(st.sampled_from(["", "+", "++", "~"]))
        value = data.draw(
            st.sampled_from(["1", "-1", "0.5", "true", "null", "x", "[1]", "{a: 1}", "'q'", "", "1,2", "${no}", "a b"])
        )
        words.append(f"{sign}{path}" if sign == "~" else f"{sign}{path}={value}")
    try:
        recipe = compose(words)
        plan = resolve(recipe.config, hosts_of(recipe.config), recipe.origins)
    except ConfigError as error:
        check_told_well(error.problems)
    else:
        check_keeps_the_rules(plan, recipe.config)


def test_a_misspelt_key_is_answered_with_the_right_one():
    paths = sorted({path.rpartition(".")[2] for path in recipe_paths(base_of("default")[0]) if "*" not in path})
    for key in paths:
        if len(key) > 4:
            assert nearest(key[:2] + key[3:], paths) is not None, key
