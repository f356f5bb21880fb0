"""How Hydra reads files: once a process, with libyaml. Owns what leans on the inside of Hydra and OmegaConf.

Importing this module puts both in place; tests/unit/config/test_remembered_files.py fails where a name is gone.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra._internal.hydra as hydra_application
import omegaconf._utils as omegaconf_reading
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig

from rlrecipes.config.origins import find_roots, to_file


@dataclass(frozen=True, slots=True)
class _Remembered:
    """What files came to, before any value of a command line.

    Attributes:
        config: pickled, since OmegaConf's are mutable; reading it makes a copy, six times faster than ``deepcopy``.
        defaults: Hydra's final defaults list.
        choices: group -> option.
        texts: of every file that was read or looked for; None where there was none.
    """

    config: bytes
    defaults: list[ResultDefault]
    choices: Mapping[str, Any]
    texts: Mapping[Path, str | None]


_REMEMBERED: dict[tuple[object, ...], _Remembered] = {}
_MAX_REMEMBERED = 256


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, which remembers what a choice of files came to, and then only sets values.

    Hydra composes once to find its mode and once more to run, a sweep once a job, and tests thousands of times;
    nearly all of it is files that have not changed. Files are compared by what is in them, so an edited one is seen.
    """

    _defaults: list[ResultDefault] | None = None
    """Of the last composition; None where its files may be others next time, although no word and no file changes."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose as Hydra does."""
        choices = self._find_choices(overrides)
        known = None
        if choices is not None:
            try:
                known = self._compose_files(config_name, choices)
            except MissingConfigException:
                raise
            except Exception:
                if run_mode == RunMode.RUN:
                    raise
                # a sweep's own composition may lack what each of its jobs chooses
        if known is None:
            return super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        config: DictConfig = pickle.loads(known.config)
        self._set_values(config, [parse_override(word) for word in overrides], set(choices or ()))
        return config

    def recall(self, config_name: str, overrides: Sequence[str]) -> _Remembered | None:
        """What is remembered of a composition; None where nothing is."""
        choices = self._find_choices(overrides)
        return None if choices is None else self._look_up(self._name(config_name, choices))

    def _find_choices(self, overrides: Sequence[str]) -> list[str] | None:
        """The words that choose files; None where they cannot be told from those that set values."""
        choices = []
        for word in overrides:
            parsed = parse_override(word)
            if parsed.is_sweep_override() or parsed.key_or_group in ("hydra.searchpath", "hydra.job.env_copy"):
                return None
            if not isinstance(parsed.value(), dict) and self.repository.group_exists(parsed.key_or_group):
                choices.append(word)
        return choices

    def _name(self, config_name: str | None, choices: Iterable[str]) -> tuple[object, ...]:
        sources = tuple(str(source) for source in self.get_sources())
        return (sources, config_name, JobRuntime.instance().get("name"), *choices)

    def _look_up(self, name: tuple[object, ...]) -> _Remembered | None:
        known = _REMEMBERED.get(name)
        return known if known and all(_read(file) == text for file, text in known.texts.items()) else None

    def _compose_files(self, config_name: str | None, choices: list[str]) -> _Remembered | None:
        name = self._name(config_name, choices)
        known = self._look_up(name)
        if known is not None:
            return known
        config = super().load_configuration(config_name, choices, RunMode.RUN)
        sources = [source.full_path() for source in self.get_sources()]
        is_ours = all(source.partition(":")[0] in ("file", "pkg", "structured") for source in sources)
        if self._defaults is None or not is_ours or config.hydra.searchpath or config.hydra.job.env_copy:
            return None
        groups = {str(group): option for group, option in config.hydra.runtime.choices.items()}
        paths = {str(default.config_path) for default in self._defaults}
        paths |= {f"{group.partition('@')[0]}/{option}" for group, option in groups.items() if option is not None}
        texts = {file: _read(file) for root in find_roots(sources) for file in (to_file(root, path) for path in paths)}
        if len(_REMEMBERED) >= _MAX_REMEMBERED:
            _REMEMBERED.clear()
        try:
            pickled = pickle.dumps(config, pickle.HIGHEST_PROTOCOL)
        except pickle.PicklingError:  # a plugin's class, of a module that Hydra has imported once more since
            return None
        known = _Remembered(pickled, self._defaults, groups, texts)
        _REMEMBERED[name] = known
        return known

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        loaded = [repo.load_config(str(default.config_path)) for default in defaults]
        # What a list names by ${...} may come from the environment, which is not compared.
        is_fixed = not any("${" in str(vars(entry)) for file in loaded for entry in file.defaults_list or ())
        self._defaults = defaults if is_fixed else None
        return super()._compose_config_from_defaults_list(defaults, repo)

    def _set_values(self, config: DictConfig, overrides: Sequence[Override], choices: set[str]) -> None:
        """What Hydra does with the words of a command line after it has composed the files that they choose."""
        self._apply_overrides_to_config([word for word in overrides if word.input_line not in choices], config)
        hydra_words = [word.input_line for word in overrides if word.is_hydra_override()]
        task_words = [word for word in overrides if not word.is_hydra_override()]
        config.hydra.overrides.hydra = hydra_words
        config.hydra.overrides.task = [word.input_line for word in task_words]
        config.hydra.runtime.cwd = os.getcwd()
        names = config.hydra.job.config.override_dirname
        config.hydra.job.override_dirname = get_overrides_dirname(
            task_words, exclude_keys=names.exclude_keys, item_sep=names.item_sep, kv_sep=names.kv_sep
        )


_PlainYaml: Any = omegaconf_reading.get_yaml_loader()


class _Yaml(yaml.CSafeLoader, _PlainYaml):  # type: ignore[misc]
    """OmegaConf's YAML, all its rules, on libyaml's parser: nine times faster.

    What is refused is read again by the plain one, for its words; so are tabs, of which libyaml allows more.
    """

    yaml_constructors = _PlainYaml.yaml_constructors
    yaml_implicit_resolvers = _PlainYaml.yaml_implicit_resolvers

    def __init__(self, stream: Any) -> None:
        text = stream if isinstance(stream, str | bytes) else stream.read()
        super().__init__(text)
        self._stream = stream
        self._has_tabs = (b"\t" if isinstance(text, bytes) else "\t") in text

    def get_single_data(self) -> Any:
        """The document."""
        if not self._has_tabs:
            try:
                return super().get_single_data()
            except yaml.YAMLError:
                pass
        if not isinstance(self._stream, str | bytes):
            self._stream.seek(0)
        return _PlainYaml(self._stream).get_single_data()


# OmegaConf has no seam for another YAML: it asks this name for one whenever it reads.
vars(omegaconf_reading)["get_yaml_loader"] = lambda: _Yaml
# Hydra has no seam for another loader: its applications make the one that this name holds.
vars(hydra_application)["ConfigLoaderImpl"] = _Loader


@lru_cache(maxsize=4096)
def parse_override(word: str) -> Override:
    """One word of a command line as Hydra reads it.

    Args:
        word: ``group=option`` or ``key=value``.

    Raises:
        HydraException: it is none.
    """
    (parsed,) = OverridesParser.create().parse_overrides([word])
    return parsed


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None


def find_defaults(loader: Any, overrides: list[str]) -> tuple[Sequence[ResultDefault], Mapping[str, Any]]:
    """Hydra's final defaults list, and group -> option.

    Args:
        loader: Hydra's.
        overrides: as Hydra got them.
    """
    known = loader.recall("config", overrides) if isinstance(loader, _Loader) else None
    if known is not None:
        return known.defaults, known.choices
    found = loader.compute_defaults_list("config", overrides, RunMode.RUN)
    return found.defaults, found.overrides.known_choices
