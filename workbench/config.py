"""Config: a recipe file becomes one checked, frozen `Recipe`, or one line that says which key is wrong.

Flow: find the file (a path, or the name of a shipped recipe) → follow `defaults:` to its ancestors → merge, oldest
first, `???` never hiding a value → `key=value` overrides → interpolation → everything filled? → types and bounds.
Every layer is checked for unknown keys by itself, so the message names the file that has them.

Invariant: what `load_recipe` returns has no `???` and no interpolation left. Not here: the fields
(`workbench.recipe_schema`), and whether this machine can run the recipe (`workbench.campaign.machines.doctor`).
"""

from __future__ import annotations

import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from workbench.errors import RecipeError
from workbench.nearest import did_you_mean, nearest
from workbench.places import shipped
from workbench.recipe_schema import MISSING, Recipe
from workbench.recipe_training import INSTEAD, NOT_OFFERED

__all__ = ["Recipe", "Resolved", "describe", "load_recipe", "resolve_recipe"]

SCHEMA = "schema default"
COMMAND_LINE = "command line"
_ENDLESS = "expected values in a few levels, got an alias (*) inside of what it names (&), or hundreds of levels"
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*[\"']?([A-Za-z0-9_]+)")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)KEY(_|$)|APIKEY", re.IGNORECASE)


@dataclass(frozen=True)
class Resolved:
    """A recipe and where each of its values came from.

    `origins` maps each dotted leaf key to a file path, `command line` or `schema default`.
    """

    recipe: Recipe
    origins: dict[str, str]


@dataclass(frozen=True)
class _Layer:
    origin: str
    values: DictConfig


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or shipped under a name, with `key=value` overrides applied.

    Raises RecipeError (exit code 2), its message one line with the key path and what is allowed there.
    """
    return resolve_recipe(path_or_name, overrides).recipe


def resolve_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """As `load_recipe`, with the origin of every value beside it."""
    path = _find(path_or_name)
    layers = [_Layer(SCHEMA, OmegaConf.create(Recipe().model_dump())), *_ancestry(path, seen=())]
    if overrides:
        layers.append(_Layer(COMMAND_LINE, _parse_overrides(overrides)))
    origins: dict[str, str] = {}
    merged = OmegaConf.create({})
    for layer in layers:
        # Interpolations stay as written until every layer is in, so that they see the final values.
        written = _plain(layer.values)
        _check_colons(written, layer.origin)
        _check_keys(written, Recipe, layer.origin)
        _forget_options_of_another(merged, layer.values)
        merged = _mapping(OmegaConf.merge(merged, layer.values))
        for key, value in _leaves(written):
            if value != MISSING or key not in origins:
                _written(origins, key, layer.origin)
    values = _interpolated(merged, path, origins)
    unfilled = [key for key, value in _leaves(values) if value == MISSING]
    if unfilled:
        listed = ", ".join(unfilled)
        raise RecipeError(
            f"{_shown(path)}: no value for {listed}; set it there or on the command line: {unfilled[0]}=…"
        )
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_explain(error, origins)) from error
    return Resolved(recipe, {key: origins.get(key, SCHEMA) for key, _ in _leaves(recipe.model_dump())})


def _written(origins: dict[str, str], key: str, origin: str) -> None:
    """`key` has its value from `origin` now: what stood above it or below it has none of its own any more."""
    for other in [other for other in origins if key.startswith(f"{other}.") or other.startswith(f"{key}.")]:
        del origins[other]
    origins[key] = origin


def describe(
    path_or_name: str | Path, overrides: Sequence[str] = (), notes: Callable[[Recipe], Mapping[str, str]] | None = None
) -> str:
    """The resolved recipe as YAML, each value with its origin behind it, and behind that what `notes` says of its key;
    notes on what is no key of the recipe stand in comments at the end."""
    resolved = resolve_recipe(path_or_name, overrides)
    said = notes(resolved.recipe) if notes is not None else {}
    lines: list[tuple[str, str]] = []
    origins = {key: f"{origin}; {said[key]}" if key in said else origin for key, origin in resolved.origins.items()}
    _describe(resolved.recipe.model_dump(), origins, "", lines)
    lines += [(f"# {key}: {note}", "") for key, note in said.items() if key not in origins]
    width = max(len(text) for text, origin in lines if origin)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def _describe(values: Mapping[str, Any], origins: Mapping[str, str], prefix: str, lines: list[tuple[str, str]]) -> None:
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append((f"{indent}{key}:", ""))
            _describe(value, origins, f"{prefix}{key}.", lines)
        else:
            written = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            lines.append((f"{indent}{key}: {written}", origins.get(f"{prefix}{key}", SCHEMA)))


def shipped_recipes() -> dict[str, str]:
    """Name of each shipped recipe, and the first sentence of the comment at its head."""
    return {file.stem: _purpose(file) for file in sorted(shipped("recipes").glob("*.yaml"))}


def _purpose(file: Path) -> str:
    comment = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in comment if not line.startswith("#  "))  # no commands
    return re.split(r"(?<=[.?]) (?=[A-Z])", text)[0]


def _find(path_or_name: str | Path) -> Path:
    """The recipe file meant: an existing path first, else a shipped name with or without `.yaml`."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    if named := _shipped(path):
        return named
    a_file = len(path.parts) > 1 or path.suffix
    where = " (that is a folder)" if path.is_dir() else f" in {Path.cwd()}" if a_file and not path.is_absolute() else ""
    raise RecipeError(f"No recipe file {str(path)!r}{where}{_hint(path)}")


def _shipped(path: Path) -> Path | None:
    """The shipped recipe of that name, with or without `.yaml`."""
    named = shipped("recipes") / (path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml")
    return named if len(path.parts) == 1 and named.is_file() else None


def _hint(path: Path) -> str:
    names = sorted(file.stem for file in shipped("recipes").glob("*.yaml"))
    return f"{did_you_mean(path.stem, names)} Shipped recipes: {', '.join(names)}"


def _ancestry(path: Path, seen: tuple[Path, ...]) -> list[_Layer]:
    """The layers of a file, its oldest ancestor first.

    `defaults:` is one file or a list of them, looked for beside the file, then among the shipped recipes.
    """
    path = path.resolve()
    shown = _shown(path)
    if path in seen:
        chain = " → ".join(p.name for p in (*seen, path))
        raise RecipeError(f"{shown}: defaults: the recipes inherit from each other in a circle: {chain}")
    try:
        values = OmegaConf.load(path)
    except RecursionError as error:
        raise RecipeError(f"{shown}: {_ENDLESS}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{shown}: cannot be read as YAML: {_one_line(error)}") from error
    if not isinstance(values, DictConfig):
        raise RecipeError(f"{shown}: expected a mapping of sections, got a list")
    written = _plain(values)
    # What OmegaConf makes of plain text. It is not quoted: it may be any file, and may be long.
    if list(written.values()) == [None] and isinstance(yaml.safe_load(path.read_text()), str):
        raise RecipeError(f"{shown}: expected a mapping of sections, got plain text")
    defaults = written.pop("defaults", None)
    kept: list[Any] = [key for key in values if key != "defaults"]  # as written: 1 is not "1"
    values = OmegaConf.masked_copy(values, kept)
    layers: list[_Layer] = []
    for parent in [defaults] if isinstance(defaults, str) else defaults or []:
        if not isinstance(parent, str):
            raise RecipeError(f"{shown}: defaults: expected a file name or a list of them, got {parent!r}")
        beside = path.parent / parent
        found = beside if beside.is_file() else _shipped(Path(parent))
        if found is None:
            raise RecipeError(f"{shown}: defaults: no file {parent!r} beside it{_hint(Path(parent))}")
        layers += _ancestry(found, (*seen, path))
    return [*layers, _Layer(shown, values)]


def _shown(path: Path) -> str:
    """A path as a person would write it from here."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    merged = OmegaConf.create({})
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"{COMMAND_LINE}: expected key=value, as in train.steps=2; got {override!r}")
        try:
            merged = _mapping(OmegaConf.merge(merged, OmegaConf.from_dotlist([override])))
        except RecursionError as error:
            raise RecipeError(f"{COMMAND_LINE}: {key}: {_ENDLESS}") from error
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            raise RecipeError(f"{COMMAND_LINE}: {override!r} cannot be read: {_one_line(error)}") from error
    return merged


def _interpolated(merged: DictConfig, path: Path, origins: Mapping[str, str]) -> dict[str, Any]:
    for key, value in _leaves(_plain(merged)):
        for variable in _ENVIRONMENT.findall(value) if isinstance(value, str) else ():
            if _SECRET.search(variable):
                raise RecipeError(
                    f"{origins[key]}: {key}: ${variable} looks like a secret, and every value of a recipe is stored "
                    "with its runs; expected another variable. What needs a token reads it from the environment itself"
                )
    try:
        return _plain(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        why = _one_line(str(error.msg or error).partition("full_key")[0])
        raise RecipeError(f"{origins.get(key, _shown(path))}: {key}: {why}") from error


def _forget_options_of_another(merged: DictConfig, layer: DictConfig) -> None:
    """A layer that names another environment, estimator or sampler drops the options meant for the one before."""
    for section in ("environment", "train.advantage", "train.sampler"):
        name = OmegaConf.select(layer, f"{section}.name", throw_on_missing=False)
        if name is not None and name != OmegaConf.select(merged, f"{section}.name", throw_on_missing=False):
            OmegaConf.update(merged, f"{section}.options", {}, merge=False)


def _plain(values: DictConfig, resolve: bool = False) -> dict[str, Any]:
    container = OmegaConf.to_container(values, resolve=resolve, throw_on_missing=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _mapping(values: Any) -> DictConfig:
    assert isinstance(values, DictConfig)
    return values


def _check_keys(values: Any, schema: type[BaseModel], origin: str, prefix: str = "") -> None:
    """Refuse what is not in the schema, naming the nearest key that is."""
    if not isinstance(values, Mapping):
        raise RecipeError(
            f"{origin}: {prefix.rstrip('.') or 'recipe'}: expected a section with "
            f"{', '.join(schema.model_fields)}; got {_in_words(values)}"
        )
    for key, value in values.items():
        field = schema.model_fields.get(str(key))
        if field is None and f"{prefix}{key}" in NOT_OFFERED:
            raise RecipeError(
                f"{origin}: {prefix}{key}: not offered, got {value!r}: {NOT_OFFERED[f'{prefix}{key}']}. Allowed in its "
                f"place: {INSTEAD[prefix.rstrip('.')]}"
            )
        if field is None:
            near = _nearest(str(key), prefix, schema)
            raise RecipeError(
                f"{origin}: unknown key {prefix}{key}{near} Allowed here: {', '.join(schema.model_fields)}"
            )
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            _check_keys(value, field.annotation, origin, f"{prefix}{key}.")


def _check_colons(written: Mapping[str, Any], origin: str) -> None:
    """Refuse `{turns:3}`, which YAML reads as one long key without a value."""
    for key, value in _leaves(written):
        name, colon, meant = key.rpartition(".")[2].partition(":")
        if value is None and colon and name and meant:
            where = key.removesuffix(f":{meant}")
            raise RecipeError(f"{origin}: {where}: a blank is missing after the colon: {{{name}: {meant}}}")


def _all_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


#: What other trainers call a key of ours.
_ALSO_CALLED = {
    "lr": "train.learning_rate",
    "max_steps": "train.steps",
    "group_size": "train.rollouts_per_group",
    "num_generations": "train.rollouts_per_group",
    "batch_size": "train.groups_per_step",
    "kl_coef": "train.kl.coefficient",
}


def _nearest(word: str, prefix: str, schema: type[BaseModel]) -> str:
    """`, did you mean …?` for a near miss in this section, or for a key that stands in another one, or has another name
    elsewhere, else `.`"""
    if word.lower() in _ALSO_CALLED:
        return f", did you mean {_ALSO_CALLED[word.lower()]}?"
    here = nearest(word, schema.model_fields)
    near = [f"{prefix}{here}"] if here else [key for key in _all_keys(Recipe) if key.rpartition(".")[2] == word][:1]
    return f", did you mean {near[0]}?" if near else "."


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, values


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """The first fault as one line: where it was written, key path, what is allowed, what came."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    key = ".".join(str(part) for part in fault["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "value_error":
        message = str(fault["ctx"]["error"])
        # A rule over several fields of the whole recipe names its key itself.
        key = key or message.partition(":")[0]
        message = message if message.startswith(key) else f"{key}: {message}"
    else:
        allowed = allowed_in_words(fault["loc"])
        if fault["loc"][-1:] == ("[key]",):
            key = ".".join(str(part) for part in fault["loc"][:-2])
            allowed = "names that are texts"
        message = f"{key}: expected {allowed}, got {_in_words(fault['input'])}"
        if isinstance(fault["input"], Mapping) and "a text" in allowed:
            message += _colon(key)
    origin = origins.get(key) or next((o for k, o in origins.items() if k.startswith(key + ".") and o != SCHEMA), None)
    return (f"{origin}: " if origin not in (None, SCHEMA) else "") + message + more


def _colon(key: str) -> str:
    """Why a text came as a mapping, and how it is written."""
    if key in ("environment.name", "train.sampler.name"):
        return f": a name and the class behind its colon, without a space ({key}=file.py:Class)"
    return ": YAML makes a mapping of a colon at the end or before a space; put the value in quotes"


def _in_words(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def allowed_in_words(location: Sequence[int | str]) -> str:
    """What the field at this key path takes, in words: `a whole number ≥ 1`, `one of 'vllm', 'scripted'`."""
    schema: Any = Recipe
    field = None
    for part in location:
        if not (isinstance(schema, type) and issubclass(schema, BaseModel)) or part not in schema.model_fields:
            break
        field = schema.model_fields[str(part)]
        schema = field.annotation
    if field is None:
        return "another value"
    return _type_in_words(field.annotation) + _bounds_in_words(field.metadata)


def _type_in_words(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:  # a bounded type inside a union keeps its bounds there
        kind, *metadata = typing.get_args(annotation)
        inner = [each for item in metadata for each in getattr(item, "metadata", [item])]
        return _type_in_words(kind) + _bounds_in_words(inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_in_words(choice) for choice in typing.get_args(annotation))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return words.get(annotation, "a mapping")


def _bounds_in_words(metadata: Sequence[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "pattern": "matching"}
    bounds = []
    for item in metadata:
        # pydantic keeps bounds as annotated-types objects and patterns in a general metadata object.
        for name, sign in signs.items():
            value = getattr(item, name, None)
            if value is not None:
                bounds.append(f"{sign} {value}")
    return (" " + " and ".join(bounds)) if bounds else ""


def _one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split())
