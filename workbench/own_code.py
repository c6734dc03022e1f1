"""Own code: the class of yours that a recipe names, as `package.module:Class` or `path/to/file.py:Class`.

A module is looked for on the Python path, a file from where the command runs. Not here: what kinds of classes there are
and what they must be able to do (the registries that ask here say so).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import RecipeError
from workbench.nearest import did_you_mean

FORMS = "package.module:Class or file.py:Class"


def names_own_code(name: str) -> bool:
    """Whether a recipe's value is such a path rather than the name of something shipped."""
    return ":" in name or name.endswith(".py")


def load(path: str, what: str) -> Any:
    """What lies at `path`. Raises RecipeError that begins with `what` where nothing does or its code does not run."""
    place, _, name = path.rpartition(":")
    if ":" not in path:
        raise RecipeError(f"{what} {path!r} names a file and no class in it; expected {path}:Class")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # somebody's module may raise anything while it is imported
        if isinstance(error, RecipeError):
            raise
        why = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{what} {path!r} cannot be imported ({why}); expected {FORMS}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        there = _classes(module)
        said = f"It has {', '.join(there)}" if there else "It has no class"
        raise RecipeError(
            f"{what} {place} has no {name!r}{did_you_mean(name, there)} {said}; expected {FORMS}"
        ) from None


def _classes(module: ModuleType) -> list[str]:
    """Names of the classes that were written in `module`, not imported into it."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and isinstance(value, type)
    ]


def _from_file(file: Path) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    # One module a file, however often and under whatever relative path it is named: classes then stay the same class.
    name = f"workbench_own_code_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
