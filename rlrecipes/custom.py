"""Functions of your own, ``module:function``: verifiers, losses. Owns how one is found, judged and loaded.

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
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, cast

from rlrecipes.errors import ConfigError, Problem
from rlrecipes.suggest import did_you_mean

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SPELLING = "check the spelling, and that it is on PYTHONPATH or in the working directory"


@dataclass(frozen=True, slots=True)
class Role:
    """What a function is for.

    Attributes:
        where: the recipe key that names it.
        options: the recipe key of its keyword arguments.
        arguments: what it is called with by position.
    """

    where: str
    options: str
    arguments: tuple[str, ...]


def check_custom(role: Role, path: str, options: Mapping[str, Any]) -> list[Problem]:
    """Judge a function by its source, importing nothing.

    Args:
        role: what it is for.
        path: ``module:function``.
        options: its keyword arguments.
    """
    if not _IMPORT_PATH.fullmatch(path):
        return [Problem(role.where, f"{path!r} is not an import path", "write package.module:function")]
    module_name, _, function_name = path.partition(":")
    try:
        spec = _find_spec(module_name)
    except (KeyError, ImportError, ValueError):
        return []  # nested namespace packages, and finders that want their parents imported
    if spec is None:
        return [Problem(role.where, f"there is no module {module_name!r}", _SPELLING)]
    if spec.origin is None or not spec.origin.endswith(".py"):
        return []
    try:
        tree = ast.parse(importlib.util.decode_source(Path(spec.origin).read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return [Problem(role.where, f"{spec.origin} cannot be read: {error}", "mend the file")]
    return _check_source(role, path, list(_bindings(tree.body)), function_name, options)


def load_custom(role: Role, path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import a function; its options are not bound.

    Args:
        role: what it is for.
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
        raise ConfigError(role.where, problem, "mend the module, or what it imports") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError.from_problems([_no_function(role, path, functions)])
    problems = _check_signature(role, path, inspect.signature(function), options)
    if problems:
        raise ConfigError.from_problems(problems)
    return cast("Callable[..., Any]", function)


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
    role: Role,
    path: str,
    bindings: Sequence[tuple[str, ast.stmt]],
    function_name: str,
    options: Mapping[str, Any],
) -> list[Problem]:
    names = {name for name, _ in bindings}
    nodes = [node for name, node in bindings if name == function_name]
    node = nodes[0] if len(nodes) == 1 else None  # bound twice: which one stands is known only when it runs
    is_constant = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
    if is_constant or not names & {function_name, "*"}:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return [_no_function(role, path, [name for name, found in bindings if isinstance(found, kinds)])]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        return _check_signature(role, path, _to_signature(node.args), options)
    return []


def _no_function(role: Role, path: str, functions: Sequence[str]) -> Problem:
    module_name, _, function_name = path.partition(":")
    problem = f"{module_name!r} has no function {function_name!r}"
    return Problem(role.where, problem, did_you_mean(function_name, functions))


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


def _check_signature(role: Role, path: str, signature: Signature, options: Mapping[str, Any]) -> list[Problem]:
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    called_with = positional[: len(role.arguments)]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(called_with) < len(role.arguments) and not takes_more:
        wanted = ", ".join(role.arguments)
        name = path.partition(":")[2]
        problem = f"{path} takes {len(called_with)} positional arguments; it is called with ({wanted})"
        return [Problem(role.where, problem, f"define it as {name}({wanted}, *, your_option=...)")]
    known = [p.name for p in parameters if p not in called_with and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        unknown = [name for name in options if name not in known]
        if unknown:
            return [
                Problem(f"{role.options}.{name}", f"there is no option {name!r}", did_you_mean(name, known))
                for name in unknown
            ]
    try:
        signature.bind(*role.arguments, **options)
    except TypeError as error:
        fix = f"give it in {role.options}, or give the parameter a default"
        return [Problem(role.options, f"{path}: {error}", fix)]
    return []
