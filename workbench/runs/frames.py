"""Frames: declared columns become Polars frames, from JSON lines or Parquet parts.

In: dicts or part files of a run. Out: frames with the columns of `schema`, in that order, then the columns that reading
adds (declared in `ADDED`, below), then whatever scalar extras a JSON line carries. Invariants: a declared column is
always there, null where the file does not know it; ids are in every row; a torn last line is not an error, a broken
line before others is one to whoever goes on from the file (`read_lines`), and is named to whoever only looks
(`scan_lines`).
Not here: which files belong to a run (reader), what the columns mean beyond their declaration (schema).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import polars as pl

from workbench.errors import RunStoreError
from workbench.places import as_word
from workbench.runs import schema
from workbench.runs.schema import Column

if TYPE_CHECKING:
    import pyarrow as pa

SIDE_BY_SIDE = 32
"""Parts from which on they are read by several threads; fewer are read in the time that those take to start."""

#: Columns that reading adds to what is stored; they come from joins or are derived, and are never written.
ADDED: dict[str, tuple[Column, ...]] = {
    "campaigns": (Column("weight_version", "i64", "", "version after the last step"),),
    "steps": (Column("run", "str", "", "run"),),
    "groups": (
        Column("run", "str", "", "run"),
        Column("task_seed", "i64", "", "what the group's task was drawn with; null: not by a campaign"),
        Column("step", "i64", "", "optimiser step the group was sampled for"),
    ),
    "rollouts": (
        Column("run", "str", "", "run"),
        Column("task_seed", "i64", "", "what its task was drawn with; null: not by a campaign"),
        Column("step", "i64", "", "optimiser step the group was sampled for; `taken_step` took it"),
        Column("verified", "bool", "", "the row passed every check of the verifier"),
        Column("taken_step", "i64", "", "optimiser step that took its group, by steps.jsonl; null: none has"),
        Column("trained_step", "i64", "", "optimiser step with tokens of it in the loss; null: none had"),
    ),
    "calls": (
        Column("run", "str", "", "run"),
        Column("order", "i64", "", "place in the ledger, from 1; failures where they happened"),
        Column("relation", "str", "", "chain, earliest, retry, branch, side_root, failed or unresolved"),
        Column("near_call_id", "str", "", "recorded call that an unresolved one nearly continues"),
        Column("near_item", "i64", "items", "first of its messages or input items that differs, from 0"),
        Column("near_path", "str", "", "where in that item, e.g. content or tool_calls[0].function.arguments.query"),
        Column("near_was", "str", "", "what was recorded there, an excerpt around the first difference"),
        Column("near_came", "str", "", "what came instead, an excerpt"),
        Column("drift", "str", "", "what differs, one sentence"),
        Column("context_digest", "str", "sha256", "digest of the request's items, from the ledger"),
        Column("context_len", "i64", "items", "items of the request"),
    ),
}

_ARRAYS = frozenset(
    {"token_ids", "token_mask", "logprobs", "trainer_logprobs", "delta", "loss_mask", "snapshot", "routes"}
    | {"route_plan", "route_agreement"}
)


def scalar_columns(table: str) -> list[str]:
    """The declared columns of a table without its token arrays: what a frame of things, not of tokens, shows."""
    return [column.name for column in schema.columns(table) if column.name not in _ARRAYS]


def polars_dtypes(table: str) -> dict[str, Any]:
    """Dtypes of a table's frame: declared columns, arrays left out, then the added ones."""
    declared = schema.polars_schema(table)
    dtypes = {name: declared[name] for name in scalar_columns(table)}
    for column in ADDED.get(table, ()):
        dtypes[column.name] = getattr(pl, schema.DTYPES[column.dtype][1])
    return dtypes


def frame_of(table: str, rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    """A frame of `rows`: every column of `polars_dtypes(table)`, then the scalar extras that the rows carry.

    Mappings in a `json` column become JSON text. Raises RunStoreError where a value does not fit its column.
    """
    dtypes = polars_dtypes(table)
    columns: dict[str, pl.Series] = {}
    for name, dtype in dtypes.items():
        values = [row.get(name) for row in rows]
        if any(issubclass(kind, dict) for kind in set(map(type, values))):
            values = [_plain(value) for value in values]
        try:
            columns[name] = pl.Series(name, values, dtype=dtype, strict=False)
        except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
            raise RunStoreError(f"Column {name} of table {table} does not hold {dtype}: {error}") from error
    extras = dict.fromkeys(
        name for row in rows for name, value in row.items() if name not in dtypes and _is_scalar(value)
    )
    for name in extras:
        values = [row.get(name) for row in rows]
        if all(value is None or isinstance(value, (int, float)) for value in values):
            columns[name] = pl.Series(name, values, strict=False)
        elif all(value is None or isinstance(value, str) for value in values):
            columns[name] = pl.Series(name, values, dtype=pl.String)
    return pl.DataFrame(columns)


def _plain(value: Any) -> Any:
    return orjson.dumps(value).decode() if isinstance(value, dict) else value


def _is_scalar(value: Any) -> bool:
    return value is not None and isinstance(value, (str, int, float, bool))


_NAMED_BY: dict[str, tuple[str, type]] = {"groups.jsonl": ("group_id", str), "steps.jsonl": ("step", int)}
"""What a line of these files is known by; without it it says nothing of anything."""
_IN_WORDS = {str: "a text", int: "a whole number"}


@dataclass
class Lines:
    """What a JSONL file holds: its objects, oldest first, one sentence for each line that is none, and whether the last
    line is torn (somebody is writing it, or was killed)."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    torn: bool = False


def scan_lines(path: Path) -> Lines:
    """Everything in a JSONL file that can be read; nothing where there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lines()
    whole = data.rfind(b"\n") + 1
    lines = Lines(torn=whole < len(data))
    for number, line in enumerate(data[:whole].split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            lines.broken.append(f"{path}, line {number} is not JSON ({error})")
            continue
        key, kind = _NAMED_BY.get(path.name, (None, object))
        if not isinstance(row, dict):
            lines.broken.append(f"{path}, line {number}: expected an object, got {type(row).__name__}")
        elif key is not None and type(row.get(key)) is not kind:
            came = repr(row[key]) if key in row else "no such key"
            lines.broken.append(f"{path}, line {number}: expected {key} to be {_IN_WORDS[kind]}, got {came}")
        else:
            lines.rows.append(row)
    return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file, oldest first; `[]` where there is no file.

    A torn last line is left out. Raises RunStoreError with file and line for any other line that is not an object.
    """
    lines = scan_lines(path)
    if lines.broken:
        raise RunStoreError(lines.broken[0])
    return lines.rows


def has_torn_line(path: Path) -> bool:
    """Whether the last line of a file has no end; looks at one byte."""
    try:
        with path.open("rb") as handle:
            if handle.seek(0, os.SEEK_END) == 0:
                return False
            handle.seek(-1, os.SEEK_END)
            return handle.read(1) != b"\n"
    except OSError:
        return False


Signature = tuple[int, int]
"""Of a file: when it was modified (ns), and its size (bytes)."""


def signature(path: Path) -> Signature | None:
    """What tells a file from what was there before; None where there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


@dataclass
class Parts:
    """What Parquet parts hold: their rows under one another, and by path why a part could not be read."""

    frame: pl.DataFrame
    damaged: dict[Path, RunStoreError] = field(default_factory=dict)


def scan_parts(table: str, paths: Iterable[Path], columns: Sequence[str] | None = None) -> Parts:
    """All that can be read of the parts of a table, in the order given; empty with the right columns for none."""
    import pyarrow as pa

    names = list(columns) if columns is not None else [column.name for column in schema.columns(table)]
    dtypes = schema.polars_schema(table)
    empty = pl.DataFrame(schema={name: dtypes[name] for name in names})
    declared = schema.arrow_schema(table)
    expected = pa.schema([declared.field(name) for name in names])

    def read(path: Path) -> pa.Table | RunStoreError | None:
        try:
            return _read_part(table, path, expected=expected, empty=empty)
        except RunStoreError as error:
            return error

    paths = list(paths)
    if len(paths) < SIDE_BY_SIDE:
        found = [read(path) for path in paths]
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="parts") as pool:
            found = list(pool.map(read, paths))
    damaged = {path: part for path, part in zip(paths, found, strict=True) if isinstance(part, RunStoreError)}
    parts = [part for part in found if isinstance(part, pa.Table)]
    if not parts:
        return Parts(empty, damaged)
    # Turned into a frame once and as one piece: part by part, and even piece by piece, takes longer.
    return Parts(pl.concat([empty, pl.DataFrame(pl.from_arrow(pa.concat_tables(parts).combine_chunks()))]), damaged)


def read_parts(table: str, paths: Iterable[Path], columns: Sequence[str] | None = None) -> pl.DataFrame:
    """As `scan_parts`, all of them.

    Raises RunStoreError naming the part that cannot be read, whose checksums do not hold, or that lacks a declared
    column.
    """
    parts = scan_parts(table, paths, columns)
    for error in parts.damaged.values():
        raise error
    return parts.frame


def _read_part(table: str, path: Path, *, expected: pa.Schema, empty: pl.DataFrame) -> pa.Table | None:
    """The columns `expected` of one part; None where it is gone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Not Polars' own reader: it looks at no checksum, and panics on a damaged page.
        with pa.OSFile(str(path)) as file, pq.ParquetFile(file, page_checksum_verification=True) as part:
            found = part.read(expected.names, use_threads=False)  # those of them that are there
        there = found.schema.names
        missing = [name for name in expected.names if name not in there]
        optional = {column.name for column in schema.columns(table) if column.optional} if missing else ()
        if lacking := [name for name in missing if name not in optional]:
            raise _damaged(path, f"is not a part of table {table}: it lacks {', '.join(lacking)}")
        for name in missing:
            found = found.append_column(expected.field(name), pa.nulls(found.num_rows, expected.field(name).type))
        if there != expected.names:
            found = found.select(expected.names)
        if not found.schema.equals(expected):
            # Other spellings of the same dtypes pass, and other dtypes do not.
            found = pl.concat([empty, pl.DataFrame(pl.from_arrow(found))]).to_arrow().cast(expected)
        return found
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError, pl.exceptions.PolarsError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        if "magic bytes not found" in why:
            why = "its end is missing, or it is no Parquet file"
        raise _damaged(path, f"is not a readable part of table {table}: {why}") from error


def _damaged(path: Path, what: str) -> RunStoreError:
    return RunStoreError(
        f"{path} {what}. Next: workbench verify {as_word(path.parent.parent)} names all that is damaged."
    )
