"""docs/troubleshooting.md quotes messages that there are, and has every one that a user can get of the runtime."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
PARTS = ("runtime", "inference", "module_inject")
INTERNAL = (
    # What only the runtime itself can do wrong, or a log that was asked for.
    "give either param or numel",
    "are in memory or being read already",
    "has no partition on NVMe",
    "a partition that is not wanted any more could not be read",
    "was not expected",
    "is not kept in one place",
    "here, but the ranks gathered",
    "expected room for",
    ": expected … elements, got ",
    ": …: expected … bytes for … …, got ",
    "expected chunks of a positive multiple of",
    "units cannot give",
    "heads cannot be divided among",
    "expected at least one rank and a grain",
    "expected a converted tensor of shape",
    ": expected shape",
    "expected a safetensors header, got a length",
)
LOGGED = ("warning", "error")


def quoted() -> list[str]:
    """The parts of messages that the page explains."""
    headings = re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)
    return [part for heading in headings for part in re.findall(r"`([^`]+)`", heading)]


def constants_in(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def sources() -> Iterator[ast.Module]:
    for part in PARTS:
        for path in sorted((ROOT / "deepspeed" / part).rglob("*.py")):
            yield ast.parse(path.read_text())


def messages() -> Iterator[str]:
    """The text of whatever is raised or logged as a warning; numbers and names in it are left out."""
    for source in sources():
        for node in ast.walk(source):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            is_logged = isinstance(call.func, ast.Attribute) and call.func.attr in LOGGED
            if not isinstance(node, ast.Raise) and not is_logged:
                continue
            text = "…".join(constant for argument in call.args for constant in constants_in(argument))
            if len(text) > 20:
                yield text


def test_every_message_is_explained() -> None:
    explained = quoted()
    missing = [text for text in messages() if not any(part in text for part in (*explained, *INTERNAL))]
    assert not missing, "explain these in docs/troubleshooting.md, or list them as internal"


def test_every_explanation_is_of_a_message_that_there_is() -> None:
    known = [constant for source in sources() for constant in constants_in(source)]
    # Docstrings and names count too, so that messages that are put together elsewhere are found.
    stale = [part for part in quoted() if not any(part in constant for constant in known)]
    assert not stale


def test_no_internal_message_is_listed_for_nothing() -> None:
    texts = list(messages())
    assert not [part for part in INTERNAL if not any(part in text for text in texts)]
