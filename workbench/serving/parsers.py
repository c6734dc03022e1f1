"""Parsers: the names of tool and reasoning parsers that the installed vLLM offers, read without importing it.

Importing vLLM takes eight seconds, and a wrong name must be refused before anything starts. Its two registries are
tables in its source, so the source is read.
Not here: what a parser does with text (vLLM).
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Literal

Kind = Literal["tool_call_parser", "reasoning_parser"]

_TABLES = {
    "tool_call_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}


def offered(kind: Kind) -> list[str] | None:
    """Names in order; None where vLLM is missing or keeps them in another way, and then only itself can tell."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    room, table = _TABLES[kind]
    try:
        tree = ast.parse((Path(found.submodule_search_locations[0]) / room / "__init__.py").read_bytes())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == table:
                return sorted(str(key.value) for key in keys if isinstance(key, ast.Constant))
    return None
