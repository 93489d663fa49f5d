"""Names of vLLM that a part of Tandem uses, and a check of a source tree of vLLM for them, without importing it."""

import ast
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)
MAX_NAMED = 5
"""Names in a refusal."""


@dataclass(frozen=True, slots=True)
class UsedNames:
    """Names of vLLM that a part of Tandem uses."""

    user: str
    """Name of the part, for messages."""
    tried: tuple[str, ...]
    """Minor versions of vLLM on which the part was tried."""
    sources: tuple[Path, ...]
    """Folders and files of code that imports from vLLM."""
    members: Mapping[str, str]
    """Members of classes, by module and class; those of base classes count."""
    signatures: Mapping[str, str]
    """First parameters of functions that the part calls by position, or replaces."""

    def fault(self, number: str) -> str:
        """Return why this environment's vLLM, version `number`, cannot be used; empty where it can.

        One of an untried minor version must have the names, and a warning tells of it.
        """
        if ".".join(number.split(".")[:2]) in self.tried:
            return ""
        spec = importlib.util.find_spec("vllm")
        assert spec is not None, "its version is known"
        assert spec.origin is not None, "it is no namespace"
        missing, tried = list(self.lacking(Path(spec.origin).parents[1])), " and ".join(self.tried)
        if missing:
            shown = "; ".join(missing[:MAX_NAMED]) + (f"; {len(missing)} in all" if len(missing) > MAX_NAMED else "")
            return f"vLLM {number} lacks names that {self.user} uses: {shown} (tried: vLLM {tried})"
        log.warning("vLLM %s has all names that %s uses, but was not tried; vLLM %s was", number, self.user, tried)
        return ""

    def lacking(self, tree: Path) -> Iterator[str]:
        """Yield what a source tree of vLLM lacks; `tree` holds the folder vllm."""
        for file in sorted(
            each for source in self.sources for each in (source, *source.rglob("*.py")) if each.is_file()
        ):
            text = file.read_text()
            for node in ast.walk(ast.parse(text)) if "from vllm" in text else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                    assert node.module is not None
                    for alias in node.names:
                        if not _is_module(tree, f"{node.module}.{alias.name}") and alias.name not in _names(
                            tree, node.module
                        ):
                            yield f"{file.name}: {node.module} has no {alias.name}"
        for place, members in self.members.items():
            module, _, name = place.partition(":")
            known = _members(tree, module, name)
            yield from (f"{place} has no {member}" for member in members.split() if member not in known)
        for place, wanted in self.signatures.items():
            module, _, path = place.partition(":")
            parameters = _parameters(tree, module, path)
            if parameters[: len(wanted.split())] != wanted.split():
                yield f"{place} takes {' '.join(parameters)}"


def _file(tree: Path, module: str) -> Path | None:
    path = tree.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def _is_module(tree: Path, module: str) -> bool:
    return _file(tree, module) is not None


@cache
def _parsed(tree: Path, module: str) -> ast.Module:
    file = _file(tree, module)
    return ast.parse(file.read_text()) if file is not None else ast.Module([], [])


@cache
def _names(tree: Path, module: str) -> set[str]:
    """Return the names that a module defines or imports, at any depth; lazily imported ones stand in strings."""
    names = set()
    for node in ast.walk(_parsed(tree, module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


@cache
def _class(tree: Path, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Return a class with its module, which may be another one that `module` imports it from."""
    for node in ast.walk(_parsed(tree, module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    for node in ast.walk(_parsed(tree, module)):
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _class(tree, node.module, name)
    return None


@cache
def _members(tree: Path, module: str, name: str) -> set[str]:
    found = _class(tree, module, name)
    if found is None:
        return set()
    module, node = found
    members = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            members.add(each.name)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            members.add(each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            members.add(each.attr)
    for base in node.bases:
        if isinstance(base, ast.Name):
            members |= _members(tree, module, base.id)
    return members


def _parameters(tree: Path, module: str, path: str) -> list[str]:
    owner, _, name = path.rpartition(".")
    found = _class(tree, module, owner) if owner else (module, _parsed(tree, module))
    if found is None:
        return []
    for node in ast.walk(found[1]):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [each.arg for each in node.args.args if each.arg != "self"]
    return []
