"""What is remembered of a composition is to the letter what Hydra composes anew."""

from __future__ import annotations

import sys

import omegaconf
import pytest
import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime, setup_globals
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlrecipes.config import loader as loading
from rlrecipes.config.compose import compose, run_hydra_app

USERS_RECIPE = """# @package _global_
defaults:
  - override /algo: rloo
  - override /cluster: ???
seed: 3
"""
WORDS = [
    [],
    ["recipe=quickstart_sft"],
    ["++optim.lr=0.5", "recipe=quickstart", "++name=x", "hydra.mode=RUN"],
    ["++algo.kl={coef: 0.5}", "~optim.lr", "++optim.lr=3", "++optim=null"],
    ["++seed=1", "++seed=2", "~seed", "hydra/launcher=basic", "hydra.sweep.dir=/x/${name}"],
    ["hydra.job.config.override_dirname.exclude_keys=[seed]", "++seed=3", "++name=y"],
    ["hydra.job.env_copy=[HOME]"],
    ["hydra.searchpath=[file:///]", "++seed=4"],
    ["hydra.job.name=mine", "++run_dir=${hydra.job.name}"],
    ["~tracking", "++seed=1"],
    ["topology=multi_model", "++topology.served_models.policy.server_groups.main.num_engines=2"],
    ["seed=1,2", "++name=x"],
    ["recipe=users", "cluster=host"],
    ["recipe=users", "++seed=5"],
    ["optim.nope=1"],
    ["~nope"],
    ["hydra.nope=1"],
    ["+seed=1"],
    ["++seed@x=1"],
    ["algo={kind: grpo}"],
    ["algo=nope", "++seed=1"],
    ["++algo=rloo"],
    ["+algo=rloo"],
    ["model=???"],
    ["a b=c"],
]


@pytest.fixture
def users_dir(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "users.yaml").write_text(USERS_RECIPE)
    return tmp_path


@pytest.fixture
def load(users_dir):
    """Compose by a class of loader."""
    version.setbase("1.3")
    setup_globals()
    JobRuntime.instance().set("name", "app")

    def run(loader_class, words, mode=RunMode.RUN):
        path = create_config_search_path("pkg://rlrecipes.conf")
        path.prepend("command-line", f"file://{users_dir}", "schema")
        try:
            config = loader_class(path).load_configuration("config", list(words), mode)
        except Exception as error:
            return type(error), str(error), repr(error.__cause__)
        flags = [config._get_flag("struct"), config.hydra._get_flag("readonly"), config.algo._get_flag("struct")]
        return OmegaConf.to_yaml(config), config, flags

    return run


OF_SWEEPS = [[], ["seed=1,2", "++name=x"], ["recipe=users", "++seed=5"], ["model=???"], ["algo=nope"], ["optim.nope=1"]]
CASES = [(words, RunMode.RUN) for words in WORDS] + [(words, RunMode.MULTIRUN) for words in OF_SWEEPS]


@pytest.mark.parametrize(("words", "mode"), CASES)
def test_what_is_remembered_is_what_hydra_composes(load, words, mode, monkeypatch, tmp_path):
    load(loading._Loader, words, mode)
    monkeypatch.chdir(tmp_path)  # of which Hydra writes down the name
    assert load(loading._Loader, words, mode) == load(ConfigLoaderImpl, words, mode)


def test_values_do_not_stay(load):
    load(loading._Loader, ["++algo.mine=[1]", "++seed=8"])
    first = load(loading._Loader, [])[1]
    OmegaConf.set_struct(first, False)
    first.algo.theirs = 1
    assert load(loading._Loader, []) == load(ConfigLoaderImpl, [])


def test_an_edited_a_new_and_a_lost_file_are_seen(load, users_dir):
    words = ["recipe=users", "cluster=host"]
    file = users_dir / "recipe" / "users.yaml"
    assert load(loading._Loader, words)[1].seed == 3
    file.write_text(USERS_RECIPE.replace("seed: 3", "seed: 4"))
    assert load(loading._Loader, words)[1].seed == 4
    file.unlink()
    assert load(loading._Loader, words) == load(ConfigLoaderImpl, words)
    file.write_text("# @package _global_\ndefaults:\n  - /mine/part@mine\n  - optional /algo@mine.algo: there_or_not\n")
    assert load(loading._Loader, words) == load(ConfigLoaderImpl, words)
    (users_dir / "mine").mkdir()
    (users_dir / "mine" / "part.yaml").write_text("a: 1\n")
    assert load(loading._Loader, words)[1].mine == {"a": 1}
    (users_dir / "algo").mkdir()
    (users_dir / "algo" / "there_or_not.yaml").write_text("b: 2\n")
    assert load(loading._Loader, words)[1].mine == {"a": 1, "algo": {"b": 2}}


def test_a_choice_from_the_environment_is_made_anew(load, users_dir, monkeypatch):
    text = "# @package _global_\ndefaults:\n  - /algo@mine: ${oc.env:MINE}\n"
    (users_dir / "recipe" / "users.yaml").write_text(text)
    for algo in ("rloo", "gspo"):
        monkeypatch.setenv("MINE", algo)
        assert load(loading._Loader, ["recipe=users"])[1].mine.name == algo


@pytest.mark.parametrize(
    "text",
    [
        "a: 1e-5\nb: 1_0\nc: yes\nd: 2001-01-01\ne: .inf\nf: 0x1f\ng: 1:30\n1: x\nh: ~\n",
        "- [a, {b: 'c'}, \"\\u00e9\", 😀]\n- |\n  text\n   more\n- >-\n  folded\n  line\n",
        "a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\n",
        "a: 1\nb: 2\na: 3\n",
        "a:\n  b: 1\n  b: 2\n",
        "a: [1\nb: 2\n",
        "a: b: c\n",
        "a:\t1\n",
        "\ta: 1\n",
        "a: 1\n--- \nb: 2\n",
        "a: !!python/object/apply:os.system [ls]\n",
        "a: *nowhere\n",
        "a: \x00\n",
        "",
        "word",
        "%YAML 9.9\n---\na: 1\n",
    ],
)
def test_yaml_is_omegaconfs_own(text, tmp_path):
    """libyaml parses; values and refusals are those of the plain loader, word for word."""
    assert omegaconf._utils.get_yaml_loader() is loading._Yaml
    (tmp_path / "file.yaml").write_text(text)

    def read(loader, source):
        try:
            return repr(yaml.load(source, loader))
        except yaml.YAMLError as error:
            return str(error)

    for loader in (loading._PlainYaml, loading._Yaml):
        with (tmp_path / "file.yaml").open() as stream:
            assert read(loader, stream) == read(loading._PlainYaml, (tmp_path / "file.yaml").open())
        assert read(loader, text) == read(loading._PlainYaml, text)
        assert read(loader, text.encode()) == read(loading._PlainYaml, text.encode())


@pytest.fixture
def parsed(monkeypatch):
    """Names of the files of conf/ that are parsed."""
    names = []
    load = yaml.load
    monkeypatch.setattr(loading, "_REMEMBERED", {})

    def spy(stream, Loader):
        names.append(str(getattr(stream, "name", "")))
        return load(stream, Loader)

    monkeypatch.setattr(yaml, "load", spy)
    return names


def test_a_command_line_parses_each_file_once(parsed, monkeypatch):
    """It fails when Hydra makes its loader, or composes, in another way: nothing would then be remembered."""
    monkeypatch.setattr(sys, "argv", ["rlrecipes"])
    recipes = []
    run_hydra_app(recipes.append, ["recipe=quickstart_sft", "seed=5"])
    (recipe,) = recipes
    assert recipe.config.seed == 5
    assert recipe.choices["recipe"] == "quickstart_sft"
    assert any(name.endswith("conf/recipe/quickstart_sft.yaml") for name in parsed)
    files = [name for name in parsed if name.endswith(".yaml")]
    assert len(files) == len(set(files))


def test_another_value_parses_no_file_again(parsed):
    first = compose(["recipe=quickstart_sft", "optim.lr=0.1"])
    before = list(parsed)
    assert before
    second = compose(["recipe=quickstart_sft", "optim.lr=0.2"])
    assert parsed == before
    assert (first.config.optim.lr, second.config.optim.lr) == (0.1, 0.2)
    assert first.origins["optim.lr"] == "override optim.lr=0.1"
    assert {**first.origins, "optim.lr": ""} == {**second.origins, "optim.lr": ""}
    assert not GlobalHydra.instance().is_initialized()
