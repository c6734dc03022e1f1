"""Own code: the class of yours that a recipe names, as `package.module:Class` or `path/to/file.py:Class`.

A module is looked for on the Python path, a file from where the command runs. Also the words for what such code raises
or returns: with its file and line, as one line that can be stored, whatever it was. Not here: what kinds of classes
there are and what they must be able to do (the registries that ask here say so).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from workbench.errors import RecipeError
from workbench.nearest import did_you_mean

FORMS = "package.module:Class or file.py:Class"
_NOT_OWN = (
    Path(__file__).parent,
    *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")),
)
"""Where code lies that a person who writes an environment has not written."""
_LONGEST = 1_000


def names_own_code(name: str) -> bool:
    """Whether a recipe's value is such a path rather than the name of something shipped."""
    return ":" in name or name.endswith(".py")


def load(path: str, what: str) -> Any:
    """What lies at `path`. Raises RecipeError that begins with `what` where nothing does or its code does not run."""
    place, _, name = path.rpartition(":")
    if ":" not in path or not name.strip():
        file = place or path
        raise RecipeError(f"{what} {path!r} names a file and no class in it; expected {file.rstrip(':')}:Class")
    if not place or ":" in place:
        raise RecipeError(
            f"{what} {path!r} has {'nothing before its colon' if not place else 'more than one colon'}; "
            f"expected {FORMS}"
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:  # somebody's module may raise anything while it is imported
        why = f"{named(error)}{raised_at(error)}"
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


def raised(error: BaseException) -> str:
    """`KeyError: 'score' at my_env.py:31`, the place being the deepest one that neither Python nor a package has."""
    # Where all of it is a package's, the one that we called counts: that is where theirs begins.
    said = named(error)
    unawaited = isinstance(error, (TypeError, AttributeError)) and re.search(r"\bcoroutine\b", said)
    return f"{said}{raised_at(error) or _at(_called(error)[:1])}{'; is an await missing there?' if unawaited else ''}"


def by_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Whether a signal raised it, and not somebody's code: only where the signal's handler is one that raises."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    return traceback.extract_tb(error.__traceback__)[-1].name == "_on_sigint"  # asyncio's, at the second Ctrl-C


def named(error: BaseException) -> str:
    """`KeyError: 'score'`, and the kind alone where it says nothing."""
    try:
        said = str(error)
    except Exception:  # somebody's exception, whose words raise in turn
        said = "(it cannot be printed)"
    return plain(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def plain(text: str) -> str:
    """`text` in one line of bounded length that can be stored: without line ends and halves of surrogate pairs."""
    text = " ".join(text[: 2 * _LONGEST].split()).encode(errors="replace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def is_text(value: Any) -> bool:
    """Whether a value is text that can be stored."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


def a(value: Any) -> str:
    """What came in place of what was expected: `None`, `a float`, `an int`."""
    kind = type(value).__name__
    if inspect.iscoroutine(value):
        value.close()  # else Python warns later, in the midst of something else
        return "a coroutine that nobody awaited"
    return "None" if value is None else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def shown(value: Any) -> str:
    """What came, and what it is: `'good' (a str)`."""
    try:
        return "None" if value is None else f"{plain(repr(value)[:100])} ({a(value)})"
    except Exception:  # somebody's object, which cannot be printed
        return a(value)


def place_of(function: Callable[..., Any]) -> str:
    """` (my_env.py:31)`, where a function is written; nothing where that is not known."""
    try:
        code = inspect.unwrap(function).__code__
    except (AttributeError, ValueError):
        return ""
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def place_in(frame: FrameType | None) -> str:
    """` at my_env.py:31`, the line of yours that runs in a stack which ends with `frame`; nothing where none does."""
    return "" if frame is None else _at(_own(traceback.extract_stack(frame))[-1:])


def raised_at(error: BaseException) -> str:
    """` at my_env.py:31`, the deepest line of yours that an error went through; nothing where it went through none."""
    return _at(_own(_called(error))[-1:])


def _own(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if not any(Path(frame.filename).is_relative_to(p) for p in _NOT_OWN)]


def _called(error: BaseException) -> list[traceback.FrameSummary]:
    # The first frame is of whoever caught it.
    return [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<")]


def _at(frames: list[traceback.FrameSummary]) -> str:
    return "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in frames)
