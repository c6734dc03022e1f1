"""Every number on /metrics moves when, and only when, what it counts has happened."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import Stack, until
from workbench.gateway.metrics import Metrics

on_one_loop = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "say something"}]
SAID = {"role": "assistant", "content": "never said"}


async def numbers(stack: Stack) -> dict[str, float]:
    answer = await stack.http.get(f"{stack.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {name: float(value) for name, value in re.findall(r"^(workbench_\S+) (\S+)$", answer.text, re.MULTILINE)}


async def moved(stack: Stack, before: dict[str, float]) -> dict[str, float]:
    """What is another number now; times and creation stamps left out."""
    now = await numbers(stack)
    names = (name for name in now if not re.search(r"_(bucket|sum|created)\b", name))
    return {name.removeprefix("workbench_"): by for name in names if (by := now[name] - before.get(name, 0.0))}


async def ask(stack: Stack, rollout_id: str, **body: Any) -> Any:
    body = {"model": "policy", "messages": USER, **body}
    return await stack.http.post(f"{stack.url}/ng-rollout/{rollout_id}/v1/chat/completions", json=body)


@on_one_loop
async def test_a_root_and_its_child(stack: Stack) -> None:
    before = await numbers(stack)
    first = (await ask(stack, "numbers")).json()["choices"][0]["message"]
    assert await moved(stack, before) == {
        'admissions_total{mode="text"}': 1,
        "commits_total": 1,
        "staging_seconds_count": 1,
        "custody_seconds_count": 1,
        "call_seconds_count": 1,
    }
    await ask(stack, "numbers", messages=[*USER, first, *USER], temperature=0.3, logprobs=True)
    after = await moved(stack, before)
    assert after['admissions_total{mode="token_in"}'] == 1
    assert after["staging_seconds_count"] == after["commits_total"] == 2
    assert after['overridden_fields_total{field="temperature"}'] == 1
    assert after['stripped_fields_total{field="logprobs"}'] == 1
    assert (await numbers(stack))["workbench_staging_seconds_sum"] > before.get("workbench_staging_seconds_sum", 0.0)


@on_one_loop
async def test_an_unresolved_call_by_its_cause(stack: Stack) -> None:
    await ask(stack, "numbers.lost")
    before = await numbers(stack)
    assert (await ask(stack, "numbers.lost", messages=[*USER, SAID, *USER])).status_code == 200
    assert await moved(stack, before) == {
        'admissions_total{mode="unresolved"}': 1,
        'unresolved_total{cause="assistant_text_changed"}': 1,
        'failures_total{reason="unresolved_parent"}': 1,
        "call_seconds_count": 1,
    }


@on_one_loop
async def test_refusals_by_their_code(stack: Stack) -> None:
    before = await numbers(stack)
    await ask(stack, "numbers.refused", n=2)
    await ask(stack, "...")
    await stack.control.freeze("numbers.frozen")
    await ask(stack, "numbers.frozen")
    await stack.http.post(
        f"{stack.url}/v1/chat/completions", content=b" " * (stack.gateway.settings.max_body_bytes + 1)
    )
    await stack.http.get(f"{stack.url}/training-token-capture/control/rollouts/numbers/manifest")
    assert await moved(stack, before) == {
        'refused_total{code="unauthorized"}': 1,
        'refused_total{code="not_capturable"}': 1,
        'refused_total{code="invalid_request"}': 1,
        'refused_total{code="rollout_frozen"}': 1,
        'refused_total{code="body_too_large"}': 1,
    }


@on_one_loop
async def test_calls_under_way_repetitions_and_late_rows(stack: Stack) -> None:
    before, store = await numbers(stack), stack.gateway.custodian.store
    asked = asyncio.create_task(ask(stack, "slow.numbers"))
    await until(lambda: stack.worker.capture.board.live_calls, "the call is under way")
    assert (await moved(stack, before))["live_calls"] == 1
    url = f"{stack.url}/ng-rollout/slow.numbers/v1/chat/completions"
    retry = {"x-stainless-retry-count": "1"}
    again = asyncio.create_task(stack.http.post(url, json={"model": "policy", "messages": USER}, headers=retry))
    await until(lambda: stack.gateway.metrics.repeated.labels("joined")._value.get(), "the retry joins it")
    store.freeze("slow.numbers")
    assert (await asked).content == (await again).content
    after = await moved(stack, before)
    assert "live_calls" not in after
    assert after["late_rows_total"] == after['repeated_requests_total{how="joined"}'] == 1
    assert "commits_total" not in after


def test_every_number_is_in_the_docs_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    told = {f"workbench_{name.removesuffix('_total')}" for name in re.findall(r"`workbench_(\w+?)(?:\{\w+\})?`", page)}
    families = text_string_to_metric_families(Metrics().render().decode())
    assert told == {family.name for family in families if not family.name.endswith("_created")}
