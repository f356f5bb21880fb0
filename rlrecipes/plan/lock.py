"""What a Plan was resolved and run with: versions, and fingerprints of model and data. Reads files, imports no package.

A lock lies beside its Plan: ``plan.lock.yaml`` beside ``plan.yaml``.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import yaml
from pydantic import ValidationError

from rlrecipes import __version__
from rlrecipes.config.schema import Section
from rlrecipes.errors import ConfigError, Problem
from rlrecipes.plan.nodes import Plan

_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "tokenizers",
    "sglang",
    "sglang-router",
    "ray",
    "hydra-core",
    "reasoning-gym",
    "numpy",
)
"""Packages whose version can change what a run computes."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_NUM_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1 << 16


class Lock(Section):
    """What stood where when a Plan was saved or run.

    Attributes:
        plan_hash: of the Plan.
        versions: package -> version, those installed.
        model: file of the model's directory -> fingerprint; empty where the run makes the weights.
        data: file of prompts -> fingerprint; those that existed.
    """

    plan_hash: str
    versions: dict[str, str]
    model: dict[str, str]
    data: dict[str, str]


def to_lock_path(plan_path: Path) -> Path:
    """Where the lock of a saved Plan lies.

    Args:
        plan_path: of the Plan.
    """
    return plan_path.with_suffix(".lock.yaml")


def build_lock(plan: Plan) -> Lock:
    """Look at everything a Plan depends on.

    Args:
        plan: the Plan.
    """
    directory = Path(plan.model.path)
    files = (
        sorted(file for pattern in _MODEL_FILES for file in directory.glob(pattern)) if not plan.model.is_random else []
    )
    paths = [Path(path) for path in (plan.data.train_path, plan.data.eval_path) if path is not None]
    return Lock(
        plan_hash=plan.hash,
        versions=dict(_read_versions()),
        model={file.name: compute_fingerprint(file) for file in files},
        data={str(path): compute_fingerprint(path) for path in paths if path.is_file()},
    )


def compute_fingerprint(path: Path) -> str:
    """SHA-256 of a file's size and content; of a file above 4 MiB, of 64 blocks of 64 KiB spread evenly over it.

    Weights that were trained on differ in every block, and a row added to data changes the size: what escapes is an
    edit of the same length between the blocks of a large file.

    Args:
        path: of the file.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _NUM_SAMPLED_BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
        else:
            for number in range(_NUM_SAMPLED_BLOCKS):
                file.seek(number * (size - _BLOCK_BYTES) // (_NUM_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def write_lock(lock: Lock, plan_path: Path) -> None:
    """Write a lock beside its Plan.

    Args:
        lock: what was found.
        plan_path: of the Plan.
    """
    draft = plan_path.with_suffix(".lock.draft")
    draft.write_text(yaml.safe_dump(lock.model_dump(), sort_keys=True, width=120), encoding="utf-8")
    draft.rename(to_lock_path(plan_path))


def read_lock(plan_path: Path) -> Lock | None:
    """The lock beside a saved Plan; None when there is none.

    Args:
        plan_path: of the Plan.

    Raises:
        ConfigError: it cannot be read.
    """
    path = to_lock_path(plan_path)
    try:
        return Lock.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        fix = "restore it, or remove it to go on without its checks"
        raise ConfigError(str(path), f"is not a lock: {str(error).splitlines()[0]}", fix) from error


def check_lock(saved: Lock, now: Lock, where: Path) -> list[str]:
    """Hold what is there now against what a lock says.

    Args:
        saved: the lock.
        now: from :func:`build_lock`.
        where: the lock's file, for the message.

    Returns:
        A line for every package of another version.

    Raises:
        ConfigError: a file of model or data is another one.
    """
    fix = f"restore the file, or remove {where} to go on with what is there now"
    versions = {
        name: (saved.versions.get(name, "none"), now.versions.get(name, "absent"))
        for name in sorted(saved.versions.keys() | now.versions.keys())
        if saved.versions.get(name) != now.versions.get(name)
    }
    since = ", ".join(f"{name} {old} is {new} now" for name, (old, new) in versions.items())
    suffix = f"; since then {since}" if since else ""
    problems = [
        Problem(f"{kind}.path" if kind == "model" else "data", f"{name} is not the file it was{suffix}", fix)
        for kind, old, new in (("model", saved.model, now.model), ("data", saved.data, now.data))
        for name in _changed(old, new)
    ]
    if problems:
        raise ConfigError.from_problems(problems)
    return [f"{name} is {new}; {where} was written with {old}" for name, (old, new) in versions.items()]


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Files that are other ones now; what was not there then, or will be made again, is none."""
    return [name for name, fingerprint in old.items() if name in new and new[name] != fingerprint]


def _read_versions() -> Iterator[tuple[str, str]]:
    yield "rlrecipes", __version__
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
