"""Verifiers of your own, ``module:function``. Owns how one is found, judged and loaded.

A Plan runs nobody's code: there the module's source is found without importing it or its packages, and read. That
tells whether the function exists and takes the options. What only importing can tell (a function made by a decorator
or a factory, a module without Python source, an import that fails) is told when a run starts, before its processes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from rlrecipes.errors import ConfigError, Problem
from rlrecipes.rewards.verifiers import Verifier
from rlrecipes.suggest import did_you_mean

_WHERE = "reward.name"
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SPELLING = "check the spelling, and that it is on PYTHONPATH or in the working directory"


def check_custom(path: str, options: Mapping[str, Any]) -> list[Problem]:
    """Judge a verifier by its source, importing nothing.

    Args:
        path: ``module:function``.
        options: its keyword arguments.
    """
    if not _IMPORT_PATH.fullmatch(path):
        return [Problem(_WHERE, f"{path!r} is not an import path", "write package.module:function")]
    module_name, _, function_name = path.partition(":")
    try:
        spec = _find_spec(module_name)
    except (KeyError, ImportError, ValueError):
        return []  # nested namespace packages, and finders that want their parents imported
    if spec is None:
        return [Problem(_WHERE, f"there is no module {module_name!r}", _SPELLING)]
    if spec.origin is None or not spec.origin.endswith(".py"):
        return []
    try:
        tree = ast.parse(importlib.util.decode_source(Path(spec.origin).read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return [Problem(_WHERE, f"{spec.origin} cannot be read: {error}", "mend the file")]
    return _check_source(path, list(_bindings(tree.body)), function_name, options)


def load_custom(path: str, options: Mapping[str, Any]) -> Verifier:
    """Import a verifier and bind its options.

    Args:
        path: ``module:function``, which :func:`check_custom` accepts.
        options: its keyword arguments.

    Raises:
        ConfigError: it cannot be imported, is no function, or does not take the options.
    """
    module_name, _, function_name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's module lies; a console script does not look there
    try:
        module = importlib.import_module(module_name)
    # The module is a user's: importing it may raise anything, and all of it means that it cannot be imported.
    except Exception as error:
        problem = f"{module_name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(_WHERE, problem, "mend the module, or what it imports") from error
    verify = getattr(module, function_name, None)
    if not callable(verify):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError.from_problems([_no_function(path, functions)])
    problems = _check_signature(path, inspect.signature(verify), options)
    if problems:
        raise ConfigError.from_problems(problems)
    return _bind(verify, options)


def _find_spec(name: str) -> ModuleSpec | None:
    """As ``importlib.util.find_spec``, which would import the packages around the module."""
    paths: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        if paths is None:
            return None
        full_name = ".".join(parts[:number])
        finders = (finder.find_spec(full_name, paths) for finder in sys.meta_path)
        spec = next((found for found in finders if found is not None), None)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
        paths = None if locations is None else list(locations)
    return spec


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names a module binds when imported, whichever way its conditions go; ``*`` for what cannot be listed."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield ("*" if node.name == "__getattr__" else node.name), node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        else:
            names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
            yield from ((name.id, node) for name in names if isinstance(name.ctx, ast.Store))
            for block in ("body", "orelse", "finalbody"):
                yield from _bindings(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _bindings(handler.body)


def _check_source(
    path: str, bindings: Sequence[tuple[str, ast.stmt]], function_name: str, options: Mapping[str, Any]
) -> list[Problem]:
    names = {name for name, _ in bindings}
    nodes = [node for name, node in bindings if name == function_name]
    node = nodes[0] if len(nodes) == 1 else None  # bound twice: which one stands is known only when it runs
    is_constant = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
    if is_constant or not names & {function_name, "*"}:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return [_no_function(path, [name for name, found in bindings if isinstance(found, kinds)])]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return _check_signature(path, _to_signature(node.args), options)
    return []


def _no_function(path: str, functions: Sequence[str]) -> Problem:
    module_name, _, function_name = path.partition(":")
    problem = f"{module_name!r} has no function {function_name!r}"
    return Problem(_WHERE, problem, did_you_mean(function_name, functions))


def _to_signature(arguments: ast.arguments) -> Signature:
    positional = [
        *((argument.arg, Parameter.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument.arg, Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [
        Parameter(name, kind, default=... if number >= first_default else Parameter.empty)
        for number, (name, kind) in enumerate(positional)
    ]
    if arguments.vararg is not None:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _check_signature(path: str, signature: Signature, options: Mapping[str, Any]) -> list[Problem]:
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not positional:
        problem = f"{path} takes no positional argument for the rollout"
        return [Problem(_WHERE, problem, "define it as verify(rollout, *, your_option=...)")]
    known = [
        p.name for p in parameters if p is not positional[0] and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        unknown = [name for name in options if name not in known]
        if unknown:
            return [
                Problem(f"reward.options.{name}", f"there is no option {name!r}", did_you_mean(name, known))
                for name in unknown
            ]
    try:
        signature.bind(None, **options)
    except TypeError as error:
        fix = "give it in reward.options, or give the parameter a default"
        return [Problem("reward.options", f"{path}: {error}", fix)]
    return []


def _bind(verify: Callable[..., Any], options: Mapping[str, Any]) -> Verifier:
    if inspect.iscoroutinefunction(verify):

        async def verify_async(rollout: Any) -> Any:
            return await verify(rollout, **options)

        return verify_async
    return lambda rollout: verify(rollout, **options)
