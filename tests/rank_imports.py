"""Importing test modules in a rank with pytest's assertion rewriting, so that a failing ``assert`` shows its values."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from _pytest.assertion.rewrite import rewrite_asserts


class AssertionRewritingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module from source with its assertions rewritten, and never through a cached ``.pyc``."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, path)
        rewrite_asserts(tree, data, path)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


class AssertionRewritingFinder:
    """Meta-path finder for test modules: those called ``test_*`` and everything below the folder of this package."""

    def __init__(self, tests_dir: Path) -> None:
        self._tests_dir = tests_dir

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        origin = Path(spec.origin)
        if not (origin.name.startswith("test_") or origin.is_relative_to(self._tests_dir)):
            return None
        return importlib.util.spec_from_file_location(
            fullname,
            origin,
            loader=AssertionRewritingLoader(fullname, spec.origin),
            submodule_search_locations=spec.submodule_search_locations,
        )


def rewrite_assertions_of_tests() -> None:
    """Install the finder in this process."""
    sys.meta_path.insert(0, AssertionRewritingFinder(Path(__file__).resolve().parent))
