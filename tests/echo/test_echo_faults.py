"""The token-echo arm where something is lost: the probe names it, and a group that cannot be stored is withdrawn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from gateway.conftest import stack_in

from workbench.echo import finalizer as module
from workbench.echo.client import EchoClient
from workbench.echo.finalizer import EchoFinalizer
from workbench.echo.probe import probe_echo
from workbench.errors import FinalizerError, ProbeFailed
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.serving.sampling import SamplingPins
from workbench.wire import Cause


@pytest_asyncio.fixture
async def url(tmp_path: Path, request: Any) -> AsyncIterator[str]:
    async with stack_in(tmp_path, [request.param], capture_enabled=False) as stack:
        yield stack.url


@pytest.mark.parametrize("url", [{"text": "1, 2, 3"}], indirect=True)
async def test_the_probe_finds_ids_and_log_probs(url: str) -> None:
    found = await probe_echo(url, "policy")
    assert found["capture_enabled"] is False
    assert isinstance(found["sampled_tokens"], int) and found["sampled_tokens"] > 1


@pytest.mark.parametrize(
    "url", [{"text": "1, 2, 3", "fault": fault} for fault in ("no_ids", "no_logprobs", "raise")], indirect=True
)
async def test_the_probe_stops_where_they_do_not_come_back(url: str) -> None:
    with pytest.raises(ProbeFailed, match="The token-echo arm's probe"):
        await probe_echo(url, "policy")


def test_an_agent_that_asks_for_another_api_is_told_which_one_there_is() -> None:
    client: Any = EchoClient(None, SamplingPins(), lambda: 0, "r.0.0.0")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"echoes chat\.completions only, this agent asked for 'responses'"):
        _ = client.responses


async def test_a_group_that_cannot_be_stored_is_withdrawn_from_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[str] = []

    async def publish_rows(rows: Any, *_: Any, **__: Any) -> list[str]:
        return [row.rollout_id for row in rows]

    async def clear_rows(keys: list[str], *, deadline_s: float) -> None:
        cleared.extend(keys)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "publish_rows", publish_rows)
    monkeypatch.setattr(module, "clear_rows", clear_rows)
    monkeypatch.setattr(module, "write_parts", full)
    outcome = RolloutOutcome(rollout_id="r.0.0.0", index=0, failure=Cause.ROLLOUT_FAILED)
    request = FinalizationRequest(group_id="g0", weight_version=0, rollouts=[outcome])
    with pytest.raises(FinalizerError, match=r"group g0 could not be stored: .*No space left"):
        await EchoFinalizer(tmp_path, 1, 5.0).finalize(request)
    assert cleared == ["r.0.0.0"]
