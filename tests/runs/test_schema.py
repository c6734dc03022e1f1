"""The run store's columns: declared once, rendered to Arrow, Polars and documentation alike."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from workbench.errors import RunStoreError
from workbench.runs import schema, writer


@pytest.mark.parametrize("table", schema.TABLES)
def test_arrow_polars_and_docs_have_the_declared_columns_in_order(table):
    names = [c.name for c in schema.columns(table)]
    assert len(set(names)) == len(names)
    assert schema.arrow_schema(table).names == names
    assert list(schema.polars_schema(table)) == names
    assert [line.split("`")[1] for line in schema.docs_table(table).splitlines()[2:]] == names
    assert all(c.meaning for c in schema.columns(table))


@pytest.mark.parametrize("table", schema.TABLES)
def test_an_empty_part_reads_back_in_polars_with_the_declared_dtypes(table, tmp_path):
    writer.write_part(tmp_path / "part.parquet", table, {c.name: [] for c in schema.columns(table)})
    assert dict(pl.read_parquet(tmp_path / "part.parquet").schema) == schema.polars_schema(table)


def test_unknown_table_names_the_tables_there_are():
    with pytest.raises(KeyError, match="rollouts"):
        schema.columns("tokens")
    with pytest.raises(ValueError, match="none of"):
        schema.Column("x", "int128", "", "")


def test_token_ids_beyond_int64_and_negative_zero_survive_a_part(tmp_path):
    values = {c.name: [None] for c in schema.columns("calls")}
    values |= {
        "token_ids": [np.array([0, 2**64 - 1], dtype=np.uint64)],
        "logprobs": [np.array([-0.0, -1.5], dtype=np.float32)],
    }
    writer.write_part(tmp_path / "part.parquet", "calls", values)
    back = pq.read_table(tmp_path / "part.parquet")
    assert back["token_ids"].to_pylist() == [[0, 2**64 - 1]]
    assert np.signbit(back["logprobs"].to_pylist()[0][0])


def test_a_part_with_other_columns_is_refused_and_leaves_nothing(tmp_path):
    values = {c.name: [] for c in schema.columns("train")}
    with pytest.raises(RunStoreError, match=r"missing \['delta'\], unknown \['deltas'\]"):
        writer.write_part(
            tmp_path / "p.parquet", "train", {("deltas" if k == "delta" else k): v for k, v in values.items()}
        )
    with pytest.raises(RunStoreError, match="does not fit"):
        writer.write_part(tmp_path / "p.parquet", "train", values | {"step": ["one"]})
    assert list(tmp_path.iterdir()) == []


def test_importing_the_schema_imports_neither_pyarrow_nor_polars():
    code = "import sys, workbench.runs.schema; sys.exit(bool({'pyarrow', 'polars', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
