"""The gallery shows every cause, and the product, not the gallery, names it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import polars as pl
import pytest
import pytest_asyncio

from workbench.demo.gallery import FAMILIES, UNREACHED, Gallery, _Stage, open_gallery
from workbench.wire import Cause

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gallery(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gallery]:
    async with open_gallery(tmp_path_factory.mktemp("gallery") / "run") as gallery:
        yield gallery


async def test_every_cause_is_an_exhibit_or_has_a_reason_why_not() -> None:
    shown = [exhibit.cause for exhibits in FAMILIES.values() for exhibit in exhibits]
    assert len(shown) == len(set(shown))
    assert set(shown) | set(UNREACHED) == set(Cause)
    assert not set(shown) & set(UNREACHED)


async def test_every_exhibit_is_named_by_the_product(gallery: Gallery) -> None:
    for row in gallery.findings.iter_rows(named=True):
        assert row["cause"] in (row["said"], row["detail"]), f"{row['cause']}: said {row['said']}, {row['detail']}"


async def test_only_the_harmless_exhibit_is_trained_on(gallery: Gallery) -> None:
    kept = gallery.findings.filter("valid")["cause"].to_list()
    assert kept == ["request_finished_without_staged_coordinates"]


async def test_every_exhibit_is_the_task_of_a_number(gallery: Gallery) -> None:
    bench: Any = None
    stage = _Stage(bench)
    tasks = [stage.task(seed) for seed in range(gallery.findings.height)]
    assert [task.task_id for task in tasks] == gallery.findings["cause"].to_list()


async def test_the_gallery_is_an_ordinary_run(gallery: Gallery) -> None:
    run = gallery.run
    assert run.rollouts.height == gallery.findings.height == sum(map(len, FAMILIES.values()))
    unresolved = run.calls.filter(pl.col("failure_reason") == "unresolved_parent")
    drifted = {exhibit.cause.value for exhibit in FAMILIES["drift"]}
    assert drifted <= set(unresolved["detail"])
    assert unresolved.filter(pl.col("detail").is_in(drifted - {"unknown_history"}))["near_call_id"].null_count() == 0


async def test_a_family_is_shown_without_ids(gallery: Gallery) -> None:
    for family in FAMILIES:
        page = gallery.show(family).html().replace("<wbr>", "")
        assert "gallery." not in page, "a rollout id would differ between runs"
        assert all(exhibit.cause.value in page for exhibit in FAMILIES[family])
    with pytest.raises(KeyError, match="is no family"):
        gallery.show("weather")
    with pytest.raises(KeyError, match="is no exhibit"):
        gallery.rollout("route_missing")
