"""The contract of a replaced module: every name that the base imports from it is there, and can be called as before.

Worked out from source alone, so that it holds for branches that this machine would never import (other accelerators)
and needs neither torch nor an installed package.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Collection, Iterator, Mapping

from fork.base_release import BaseRelease
from fork.check import Finding
from fork.manifest import Manifest, Mode, OverlayFile, kept_base_path

_PYTHON_ROOTS = ("deepspeed/", "op_builder/")


@dataclass(frozen=True)
class Use:
    """One name that the base needs from a module of ours, and the base file and line that needs it."""

    module: str
    name: str
    where: str


@dataclass(frozen=True)
class Parameters:
    """How a function may be called. `required` counts neither defaults nor `*args`, `**kwargs`."""

    positional: tuple[str, ...]
    keyword_only: frozenset[str]
    required: frozenset[str]
    takes_any_positional: bool
    takes_any_keyword: bool

    @classmethod
    def of(cls, arguments: ast.arguments) -> Parameters:
        positional = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
        optional = positional[len(positional) - len(arguments.defaults) :]
        keyword_only = {argument.arg for argument in arguments.kwonlyargs}
        keyword_optional = {
            argument.arg
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)
            if default is not None
        }
        return cls(
            positional=positional,
            keyword_only=frozenset(keyword_only),
            required=frozenset((set(positional) - set(optional)) | (keyword_only - keyword_optional)),
            takes_any_positional=arguments.vararg is not None,
            takes_any_keyword=arguments.kwarg is not None,
        )

    def breaks(self, old: Parameters) -> str | None:
        """Why a call that suits `old` may not suit this one, or None."""
        for index, name in enumerate(old.positional):
            by_position = index < len(self.positional) and self.positional[index] == name
            if not by_position and not (self.takes_any_positional and self.takes_any_keyword):
                got = repr(self.positional[index]) if index < len(self.positional) else "nothing"
                return f"expected parameter {index + 1} to be {name!r}, got {got}"
        for name in sorted(old.keyword_only):
            if name not in self.keyword_only and name not in self.positional and not self.takes_any_keyword:
                return f"expected the keyword {name!r}"
        for name in sorted(self.required - old.required):
            return f"expected {name!r} to be optional"
        if old.takes_any_positional and not self.takes_any_positional:
            return "expected *args"
        if old.takes_any_keyword and not self.takes_any_keyword:
            return "expected **kwargs"
        return None


def contract_findings(manifest: Manifest, base: BaseRelease, root: Path) -> list[Finding]:
    """Names that the base imports from a replaced or extended module and that ours lacks or has changed."""
    files = {
        path: file
        for file in manifest.files.values()
        if file.mode is not Mode.ADDS and file.path.endswith(".py")
        for path in file.destinations()
    }
    uses = list(uses_of({module_name(path) for path in files}, base))
    by_module = {module_name(path): file for path, file in files.items()}
    findings = {
        Finding(by_module[use.module].path, f"{problem} (needed by the base in {use.where})")
        for use in uses
        for problem in _broken(use, by_module[use.module], base, root)
    }
    return sorted(findings)


def module_name(path: str) -> str:
    """`deepspeed/a/__init__.py` -> `deepspeed.a`, `deepspeed/a/b.py` -> `deepspeed.a.b`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def uses_of(modules: set[str], base: BaseRelease) -> Iterator[Use]:
    """Every name that any module of the base takes from one of `modules`, by import or through an imported module."""
    for path in base:
        if path.endswith(".py") and path.startswith(_PYTHON_ROOTS) and module_name(path) not in modules:
            yield from _uses_in(path, ast.parse(base.read(path), filename=path), modules, base)


def _uses_in(path: str, tree: ast.Module, modules: set[str], base: BaseRelease) -> Iterator[Use]:
    aliases: dict[str, str] = {}  # local name -> the module of ours that it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = _absolute(node, path)
            for alias in node.names:
                if source in modules:
                    names = _public_names(source, base) if alias.name == "*" else [alias.name]
                    yield from (Use(source, name, f"{path}:{node.lineno}") for name in names)
                elif f"{source}.{alias.name}" in modules:
                    aliases[alias.asname or alias.name] = f"{source}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    aliases[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            module = aliases.get(ast.unparse(node.value)) if aliases else None
            if module is not None:
                yield Use(module, node.attr, f"{path}:{node.lineno}")


def _absolute(node: ast.ImportFrom, path: str) -> str:
    """The absolute name of the module that a `from … import` of the file at `path` reads."""
    if not node.level:
        return node.module or ""
    package = PurePosixPath(path).parts[: -node.level]
    return ".".join((*package, *([node.module] if node.module else [])))


def _public_names(module: str, base: BaseRelease) -> list[str]:
    path = f"{module.replace('.', '/')}.py"
    if path not in base:
        path = f"{module.replace('.', '/')}/__init__.py"
    return [name for name in top_level(ast.parse(base.read(path))) if not name.startswith("_")]


def top_level(tree: ast.Module) -> Mapping[str, ast.AST]:
    """The names that a module defines or imports at its top level, branches included, and the node of each."""
    found: dict[str, ast.AST] = {}
    pending: list[ast.stmt] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found.update({name.id: node for name in ast.walk(target) if isinstance(name, ast.Name)})
        else:
            blocks = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            pending.extend(statement for block in blocks for statement in block if isinstance(statement, ast.stmt))
    return found


def _broken(use: Use, file: OverlayFile, base: BaseRelease, root: Path) -> Iterator[str]:
    ours_tree = ast.parse((root / file.path).read_bytes())
    ours = top_level(ours_tree)
    theirs = top_level(ast.parse(base.read(file.path)))
    if use.name not in ours:
        passed_on = file.mode is Mode.EXTENDS and not use.name.startswith("_") and _imports_all(ours_tree, file)
        if not (passed_on and use.name in theirs) and f"{use.module}.{use.name}" not in _submodules(use.module, base):
            yield f"does not define {use.name}"
        return
    old, new = theirs.get(use.name), ours[use.name]
    if isinstance(old, ast.FunctionDef) and isinstance(new, ast.FunctionDef):
        problem = Parameters.of(new.args).breaks(Parameters.of(old.args))
        if problem:
            yield f"{use.name}: {problem}"
    elif isinstance(old, ast.ClassDef) and isinstance(new, ast.ClassDef):
        yield from _broken_methods(old, new, file.drops)


def _broken_methods(old: ast.ClassDef, new: ast.ClassDef, drops: Collection[str]) -> Iterator[str]:
    """Public methods and the constructor. A method that is absent here may be inherited where ours has a base class."""
    ours = {node.name: node for node in new.body if isinstance(node, ast.FunctionDef)}
    for method in old.body:
        if not isinstance(method, ast.FunctionDef) or (method.name.startswith("_") and method.name != "__init__"):
            continue
        if method.name not in ours:
            if not new.bases and f"{old.name}.{method.name}" not in drops:
                yield f"{old.name} does not define {method.name}"
            continue
        problem = Parameters.of(ours[method.name].args).breaks(Parameters.of(method.args))
        if problem:
            yield f"{old.name}.{method.name}: {problem}"


def _imports_all(tree: ast.Module, file: OverlayFile) -> bool:
    """Whether ours passes on everything public of the base's file with `from ._base_x import *`."""
    kept = PurePosixPath(kept_base_path(file.path)).stem
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[-1] == kept
        and any(alias.name == "*" for alias in node.names)
        for node in tree.body
    )


def _submodules(module: str, base: BaseRelease) -> set[str]:
    prefix = module.replace(".", "/") + "/"
    return {module_name(path) for path in base if path.startswith(prefix) and path.endswith(".py")}
