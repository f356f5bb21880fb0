"""YAML groups and overrides composed into a RunConfig. The only user of Hydra and OmegaConf outside cli/.

Hydra alone is not strict: a misspelt key passes inside YAML and with ``+``. So every value override is handed to
Hydra as ``++`` (it never complains) and the closed schema judges the whole result, all problems at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises instead of printing and exiting

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    SearchPathException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlrecipes.config.loader import find_defaults, parse_override
from rlrecipes.config.origins import Choices, Origins, find_roots, read_origins, show_file
from rlrecipes.config.schema import RunConfig
from rlrecipes.config.validation import validate
from rlrecipes.errors import ConfigError, Problem, name_rule
from rlrecipes.suggest import did_you_mean, nearest

CONFIG_MODULE = "rlrecipes.conf"
COMPOSITION = "composition"
"""What refuses words and groups that do not make a recipe, in ``Problem.rule``."""
CAN_SUBMIT = "can_submit"
"""Attribute of the function that Hydra runs: :func:`run_hydra_app`'s."""
NAME_POINT = "name_point"
"""Attribute of the same: :func:`run_hydra_app`'s."""
_CONF_DIR = Path(__file__).parent.parent / "conf"
_FLAGS_OF_ONE_RUN = ("-m", "--multirun", "--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help", "--run", "-r")
"""Hydra takes one of them at a time."""
_FLAGS_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir",
"-cd", "--experimental-rerun", "--info", "-i")  # fmt: skip


type NamePoint = Callable[[Sequence[str]], Mapping[str, str] | None]


@dataclass(frozen=True, slots=True)
class ComposedRecipe:
    """A validated recipe and where each of its values was set.

    Attributes:
        config: the recipe.
        origins: dotted path -> ``file:line`` or ``override``.
        choices: group -> option.
        overrides: as given, for the record.
        problems: of single values; where there are any, defaults stand in for them in ``config``, so that rules
            across values can be checked too before all is told.
    """

    config: RunConfig
    origins: Origins
    choices: Choices
    overrides: tuple[str, ...]
    problems: tuple[Problem, ...] = ()


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> ComposedRecipe:
    """Compose and validate a recipe, from a library rather than the command line.

    Args:
        overrides: Hydra overrides, e.g. ``["recipe=quickstart", "algo.group_size=4"]``.
        config_dir: an extra directory of groups; it wins over ours.

    Raises:
        ConfigError: every problem found.
    """
    config_dirs = [config_dir] if config_dir else []
    prepared = prepare_overrides(overrides, config_dirs)
    try:
        recipe = _compose(prepared, config_dirs)
    except MissingConfigException as error:
        recipe = _stand_in(error, prepared, config_dirs)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise _explain(error) from error
    if recipe.problems:
        raise ConfigError.from_problems(recipe.problems)
    return recipe


def _compose(prepared: Sequence[str], config_dirs: Sequence[Path]) -> ComposedRecipe:
    paths = ",".join(f"'file://{directory.absolute()}'" for directory in config_dirs)
    words = [*prepared, f"hydra.searchpath=[{paths}]"] if paths else list(prepared)
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return to_recipe(hydra.compose("config", overrides=words), words, config_dirs)


def run_hydra_app(
    task: Callable[[ComposedRecipe], None],
    arguments: Sequence[str],
    name_point: NamePoint | None = None,
    *,
    can_submit: Literal[False, "judge", "submit"] = False,
) -> None:
    """Run ``task`` once per composed recipe, under Hydra's own command line (-m, --cfg, --config-dir, completion).

    Args:
        task: called with each recipe, in a process of its own where the launcher has it so; one that has problems it
            must refuse.
        arguments: the command line after the verb.
        name_point: of a sweep: overrides of a point -> values of its own, by dotted path; None leaves the point out. By
            default points are numbered, since runs of one sweep must not share a directory.
        can_submit: whether a launcher may train the recipes elsewhere, instead of calling ``task``; ``judge``: it only
            tells what is wrong with them and its options.

    Raises:
        ConfigError: every problem found.
    """

    def run_one(composed: DictConfig) -> None:
        def name_by_number(_: Sequence[str]) -> Mapping[str, str]:
            return {"name": f"{composed.name}-{HydraConfig.get().job.num}"}

        try:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                values = (name_point or name_by_number)(HydraConfig.get().overrides.task)
                if values is None:
                    return
                for path, value in values.items():
                    OmegaConf.update(composed, path, value)
            task(to_recipe(composed, list(HydraConfig.get().overrides.task)))
        except Exception as error:
            raise _Stopped(error) from error

    config_dirs = config_dirs_of(arguments)
    words = _prepare_arguments(arguments, config_dirs)
    setattr(run_one, NAME_POINT, name_point)
    if can_submit:
        setattr(run_one, CAN_SUBMIT, can_submit)
        words = _imply_multirun(words)
    sys.argv = [sys.argv[0], *words]
    app = hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="config")(run_one)
    try:
        _call(app)
    except MissingConfigException as error:
        recipe = _stand_in(error, [word for word in words if _is_override(word)], config_dirs)
        task(recipe)  # tells these problems with those it finds itself
        raise ConfigError.from_problems(recipe.problems) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise _explain(error) from error


def find_shared(arguments: Sequence[str]) -> list[str] | None:
    """Overrides of a command line that all points of its sweep share, as they were given; None where it is no sweep.

    Args:
        arguments: the command line after the verb.
    """
    words = [word for word in arguments if _is_override(word)]
    if not {"-m", "--multirun"} & set(arguments) and "hydra.mode=MULTIRUN" not in words:
        return None
    return [word for word in words if not _is_swept(word)]


def _is_swept(word: str) -> bool:
    try:
        return bool(parse_override(word).is_sweep_override())
    except HydraException:
        return False  # told when it is composed


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers between two, as ``interval(low, high)`` says; ``tag(log, ...)`` spreads them by their logarithm."""

    low: float
    high: float
    is_log: bool


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What a sweep searches.

    Attributes:
        fixed: words that all points share.
        dimensions: key as Hydra gets it -> the values of a choice or range, or an interval.
    """

    fixed: tuple[str, ...]
    dimensions: Mapping[str, tuple[str, ...] | Interval]

    def to_words(self, values: Mapping[str, object]) -> list[str]:
        """Overrides of a point.

        Args:
            values: of the dimensions.
        """
        return [*self.fixed, *(f"{key}={value}" for key, value in values.items())]


def read_search_space(words: Sequence[str]) -> SearchSpace:
    """What a sweep's overrides span.

    Args:
        words: as Hydra gives them to a sweeper.
    """
    fixed: list[str] = []
    dimensions: dict[str, tuple[str, ...] | Interval] = {}
    for word in words:
        parsed = parse_override(word)
        value = parsed.value()
        if isinstance(value, IntervalSweep):
            assert value.start is not None and value.end is not None  # Hydra's grammar has both
            dimensions[parsed.get_key_element()] = Interval(float(value.start), float(value.end), "log" in value.tags)
        elif parsed.is_sweep_override():
            dimensions[parsed.get_key_element()] = tuple(map(str, parsed.sweep_string_iterator()))
        else:
            fixed.append(word)
    return SearchSpace(tuple(fixed), dimensions)


def compose_jobs(
    loader: Any,
    base: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
    name_point: NamePoint | None = None,
) -> list[ComposedRecipe]:
    """Every recipe of a sweep at once, for a launcher that runs them elsewhere. One alone keeps its name.

    Args:
        loader: Hydra's.
        base: what Hydra composed for the sweep.
        job_overrides: of each job.
        first_number: of its jobs.
        name_point: as :func:`run_hydra_app` takes it.

    Raises:
        ConfigError: every problem found, of all of them.
    """
    recipes, problems = [], dict[Problem, None]()
    for number, overrides in enumerate(job_overrides, first_number):
        try:
            composed = loader.load_sweep_config(base, list(overrides))
            words = list(composed.hydra.overrides.task)
            OmegaConf.set_struct(composed, False)
            del composed["hydra"]
            is_numbered = len(job_overrides) > 1 or first_number > 0
            by_number = {"name": f"{composed.name}-{number}"} if is_numbered else {}
            values = by_number if name_point is None else name_point(words)
            if values is None:
                continue
            for path, value in values.items():
                OmegaConf.update(composed, path, value)
            recipes.append(to_recipe(composed, words))
        except MissingConfigException as error:
            problems |= dict.fromkeys(_collect(error, list(overrides)))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            problems |= dict.fromkeys(_explain(error).problems)
    if problems:
        raise ConfigError.from_problems(list(problems))
    return recipes


def _collect(error: MissingConfigException, words: Sequence[str]) -> Sequence[Problem]:
    try:
        return _stand_in(error, words, []).problems
    except ConfigError as found:
        return found.problems


class _Stopped(BaseException):
    """Carries an error past Hydra, which would print any Exception its own way and go on with the sweep."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _call(app: Callable[[], object]) -> None:
    error: Exception | None = None
    try:
        app()
    except _Stopped as stopped:
        error = stopped.error
    if error is not None:
        raise error


def to_recipe(composed: DictConfig, overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> ComposedRecipe:
    """Leave OmegaConf: resolve, validate, and keep where each value came from.

    Args:
        composed: Hydra's result.
        overrides: as Hydra got them.
        config_dirs: directories that Hydra was told of by an override.

    Raises:
        ConfigError: too much is wrong for defaults to stand in.
    """
    loader = GlobalHydra.instance().config_loader()
    task_overrides = [word for word in overrides if not word.startswith("hydra")]
    defaults, known_choices = find_defaults(loader, list(overrides))
    sources = [f"file://{directory.absolute()}" for directory in config_dirs]
    sources += [source.full_path() for source in loader.get_sources()]  # in the order in which Hydra searches them
    origins, choices = read_origins(defaults, known_choices, find_roots(sources), overrides)
    data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    if not isinstance(data, dict):
        raise ConfigError("config", f"is a {type(data).__name__}, not a mapping", "start from conf/config.yaml")
    plain = {str(key): value for key, value in data.items()}
    config, problems = validate(plain, origins)
    if config is None:
        config = _validate_with_defaults(plain, problems, loader)
    if config is None:
        raise ConfigError.from_problems(problems)
    return ComposedRecipe(config, origins, choices, tuple(task_overrides), tuple(problems))


def _validate_with_defaults(data: dict[str, Any], problems: Sequence[Problem], loader: Any) -> RunConfig | None:
    """The recipe with every wrong value replaced by its default; None when that does not mend it."""
    composed = loader.load_configuration("config", overrides=[], run_mode=RunMode.RUN)
    own = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    defaults = OmegaConf.to_container(own, resolve=True, throw_on_missing=False)
    for problem in problems:
        *parents, leaf = problem.where.split(".")
        here: Any = data
        default: Any = defaults
        for step in parents:
            here = here.get(step) if isinstance(here, dict) else None
            default = default.get(step) if isinstance(default, dict) else None
        if isinstance(here, dict):
            here.pop(leaf, None)
            if isinstance(default, dict) and leaf in default:
                here[leaf] = default[leaf]
    return validate(data, {})[0]


def config_dirs_of(arguments: Sequence[str]) -> list[Path]:
    """Directories of groups beside ours that a command line names.

    Args:
        arguments: the command line after the verb.
    """
    pairs = zip(arguments, arguments[1:], strict=False)
    after_flag = [Path(value) for flag, value in pairs if flag in ("--config-dir", "-cd")]
    return after_flag + [Path(word.partition("=")[2]) for word in arguments if word.startswith("--config-dir=")]


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _prepare_arguments(arguments: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    if any(word in ("-sc", "--shell-completion") for word in arguments):
        return list(arguments)
    _check_no_stray_word(arguments)
    # Overrides first: Hydra's parser refuses flags between them, and a bare --info would swallow one.
    overrides = prepare_overrides([word for word in arguments if _is_override(word)], config_dirs)
    return [*overrides, *(word for word in arguments if not _is_override(word))]


def _imply_multirun(words: Sequence[str]) -> list[str]:
    """Hydra asks its launcher for sweeps alone; who names one wants it for a single run too."""
    is_launched = any(word.startswith("hydra/launcher=") and word != "hydra/launcher=basic" for word in words)
    asks = any(word.partition("=")[0] in _FLAGS_OF_ONE_RUN for word in words)
    return [*words, "--multirun"] if is_launched and not asks else list(words)


def _check_no_stray_word(arguments: Sequence[str]) -> None:
    problems = [
        Problem(word, "is neither key=value nor a flag", _explain_stray(word))
        for before, word in zip(["", *arguments], arguments, strict=False)
        if not word.startswith("-") and not _is_override(word) and before not in _FLAGS_WITH_VALUE
    ]
    if problems:
        raise ConfigError.from_problems(name_rule(problems, COMPOSITION))


def _explain_stray(word: str) -> str:
    groups = [group.name for group in _CONF_DIR.iterdir() if group.is_dir()]
    choices = [f"{group}={option}" for group in groups for option in sorted(_options(group, [])) if option == word]
    return f"did you mean {choices[0]!r}?" if choices else f"write group=option or key=value, as in {word}=..."


def prepare_overrides(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> list[str]:
    """Hand value overrides to Hydra as ``++``, so that the schema judges them; groups stay as they are.

    Args:
        overrides: as the user gave them.
        config_dirs: directories of groups beside ours.

    Raises:
        ConfigError: one cannot be parsed.
    """
    prepared: list[str] = []
    problems: list[Problem] = []
    for word in overrides:
        try:
            parsed = parse_override(word)
        except HydraException as error:
            fix = "write key=value, quoting special characters"
            problems.append(Problem(word, f"is not an override: {str(error).splitlines()[0]}", fix))
            continue
        key = parsed.key_or_group
        options = _options(key.partition("@")[0], config_dirs)
        if not key:
            problems.append(Problem(word, "is not an override: nothing stands before the =", "write key=value"))
        elif options and not parsed.is_delete() and not parsed.is_sweep_override() and not _is_option(parsed.value()):
            problems.append(
                Problem(key, f"is a group, and {parsed.value()!r} no option of it", did_you_mean("", options))
            )
        elif options or parsed.is_delete() or _is_hydras(key):
            prepared.append(word)
        else:
            prepared.append("++" + word.lstrip("+"))
    if problems:
        raise ConfigError.from_problems(name_rule(problems, COMPOSITION))
    return prepared


def _is_hydras(key: str) -> bool:
    """Whether Hydra judges a key itself; options of the launcher are judged by it, new ones among them."""
    return key == "hydra" or (key.startswith(("hydra.", "hydra/")) and not key.startswith("hydra.launcher."))


def _options(group: str, config_dirs: Sequence[Path]) -> set[str]:
    roots = [root / group for root in (_CONF_DIR, *config_dirs) if group and (root / group).is_dir()]
    return {file.stem for root in roots for file in root.glob("*.yaml")}


def _is_option(value: object) -> bool:
    return isinstance(value, str | list)


def _explain(error: Exception) -> ConfigError:
    return ConfigError.from_problems(name_rule(_describe(error).problems, COMPOSITION))


def _describe(error: Exception) -> ConfigError:
    """Say what Hydra meant."""
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}:{mark.line + 1}" if mark else "YAML"
        return ConfigError(where, f"is not YAML: {getattr(error, 'problem', error)}", "mend this line")
    if isinstance(error, OmegaConfBaseException):
        where = str(getattr(error, "full_key", "") or "config")
        return ConfigError(where, str(error).splitlines()[0], "every ${...} must name an existing key")
    if isinstance(error, SearchPathException):
        return ConfigError("--config-dir", str(error), "name an existing directory of config groups")
    reason = str(error).splitlines()[0]
    if reason.startswith("Ambiguous value"):
        word = reason.partition("'")[2].rstrip("'").lstrip("+")
        return ConfigError(word, "holds several values", "sweep over them with -m, or write key=[...] for a list")
    wrong = "is not a group override" if isinstance(error, ConfigCompositionException) else "cannot be composed"
    return ConfigError("overrides", f"{wrong}: {reason}", "see the groups under conf/, chosen as group=option")


def _stand_in(error: MissingConfigException, words: Sequence[str], config_dirs: Sequence[Path]) -> ComposedRecipe:
    """Compose although groups have no such option, with the nearest one or the default in its place.

    Whatever else is wrong is then found too; the recipe carries the wrong choices among its problems.

    Raises:
        ConfigError: nothing can stand in.
    """
    problems: list[Problem] = []
    left = [_first_of_sweep(word) for word in words if not word.startswith("hydra")]
    told: set[str] = set()
    current: Exception = error
    while isinstance(current, MissingConfigException) and current.missing_cfg_file not in told:
        missing = str(current.missing_cfg_file)
        told.add(missing)
        group, _, option = missing.rpartition("/")
        if not group:
            fix = "leave it out: every recipe starts from conf/config.yaml and is chosen with recipe=NAME"
            raise ConfigError("--config-name", f"there is no {option!r}", fix)
        choices = _options(group, config_dirs) or set(current.options or ())
        near = nearest(option, sorted(choices))
        judged = f"the rest is judged with {near!r}" if near else "the rest is judged with the default"
        origin = _origin_of_choice(str(current), group, option, left, config_dirs)
        fix = did_you_mean(option, choices)
        problems.append(Problem(group, f"has no option {option!r}; {judged}", fix, origin, COMPOSITION))
        left = _replace_choice(left, group, near)
        try:
            recipe = _compose(left, config_dirs)
        except ConfigError as others:
            raise ConfigError.from_problems([*problems, *others.problems]) from others
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as another:
            current = another
        else:
            return replace(recipe, problems=(*problems, *recipe.problems))
    if not isinstance(current, MissingConfigException):
        problems += _explain(current).problems
    raise ConfigError.from_problems(problems)


def _first_of_sweep(word: str) -> str:
    parsed = parse_override(word)
    if not parsed.is_sweep_override():
        return word
    return f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"


def _replace_choice(words: Sequence[str], group: str, near: str | None) -> list[str]:
    instead = [f"{group}={near}"] if near else []
    others = [word for word in words if word.lstrip("+").partition("=")[0] != group]
    return [*others, *instead]  # where a file chose it, the command line wins over that file


def _origin_of_choice(message: str, group: str, option: str, words: Sequence[str], config_dirs: Sequence[Path]) -> str:
    if f"{group}={option}" in words:
        return f"override {group}={option}"
    # Hydra names the file whose list was being read, which for an override inside a recipe is the primary config.
    parent = re.match(r"In '([^']+)'", message)
    chosen = [word.lstrip("+").replace("=", "/", 1) for word in words] + ([parent[1]] if parent else [])
    pattern = re.compile(rf"^\s*- (override )?(/?{re.escape(group)}: *)?{re.escape(option)}\s*(#|$)")
    for file in (root / f"{name}.yaml" for name in chosen for root in (*config_dirs, _CONF_DIR)):
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        number = next((number for number, line in enumerate(lines, 1) if pattern.match(line)), None)
        if number is not None:
            return f"{show_file(file)}:{number}"
    return ""
