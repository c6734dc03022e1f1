"""What a gateway refuses has a line in a file: who, why; not what came with the request, and never a flood."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import polars as pl
import pytest
import pytest_asyncio

from conftest import until
from workbench.campaign.served.refusal_lines import RefusalLines, line_of
from workbench.gateway import refused_log
from workbench.gateway.app import Gateway
from workbench.gateway.settings import GatewaySettings
from workbench.ledger import LedgerStore
from workbench.runs.frames import scan_lines
from workbench.runs.refused import REFUSED_FILE, is_cut, refused_frame, refused_words

CHAT = "/ng-rollout/{}/v1/chat/completions"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture
async def agent(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway whose worker nobody asks: every request here is refused before."""
    settings = GatewaySettings(
        ledger_dir=str(tmp_path / "ledger"), worker_url="http://127.0.0.1:9", refused_path=str(tmp_path / REFUSED_FILE)
    )
    gateway = Gateway(settings, "control", "worker")
    transport = httpx.ASGITransport(gateway.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
    await gateway.close()


def shown(run_dir: Path) -> list[str]:
    lines: list[str] = []
    follower = RefusalLines(run_dir, lines.append)
    follower.look()
    follower.look()
    return lines


async def test_every_kind_of_refusal_is_one_line_without_what_came_with_the_request(
    agent: httpx.AsyncClient, tmp_path: Path
) -> None:
    LedgerStore(tmp_path / "ledger").freeze("closed.1")
    secret = {"authorization": "Bearer sk-a-secret"}
    await agent.post(CHAT.format("a.1"), json=ASK | {"n": 2}, headers=secret)
    await agent.post(CHAT.format("closed.1"), json=ASK, headers=secret)
    await agent.post("/ng-rollout/a.2/chat/completions", json=ASK)
    await agent.post(CHAT.format("bad name"), json=ASK)
    await agent.post(CHAT.format("a.3"), content=b'{"say": "\x1b[2J')
    await agent.get("/nowhere")
    await agent.get("/training-token-capture/control/rollouts/a.4/manifest", headers=secret)
    heads = [line.partition(": ")[0] for line in shown(tmp_path)]
    assert heads == [
        "a.1  REFUSED 400 not_capturable",
        "closed.1  REFUSED 409 rollout_frozen",
        "a.2  REFUSED 404 unknown_route",
        "(no rollout)  REFUSED 400 invalid_request",
        "a.3  REFUSED 400 invalid_request",
        "(no rollout)  REFUSED 404 http_404",
        "a.4  REFUSED 401 unauthorized",
    ]
    assert "Next: a new <rollout> name" in shown(tmp_path)[1]
    written = (tmp_path / REFUSED_FILE).read_text()
    assert "sk-a-secret" not in written and "\x1b" not in written and "[2J" not in written


async def test_what_is_replaced_or_left_out_of_requests_is_said_of_each_field_once(
    agent: httpx.AsyncClient, tmp_path: Path
) -> None:
    sets = {"temperature": 0.1, "logprobs": True, "presence_penalty": 1.5, "logit_bias": {str(n): 5 for n in range(99)}}
    for value in (0.1, 0.2):
        await agent.post(CHAT.format("a.1"), json=ASK | sets | {"temperature": value})
    await agent.post(CHAT.format("a.2"), json=ASK | {"temperature": 0.3, "top_p": 0.5, "max_tokens": 4})
    with (tmp_path / REFUSED_FILE).open("ab") as file:  # another process of the gateway has seen one of them too
        file.write(orjson.dumps({"rollout_id": "a.3", "field": "top_p", "came": "0.5", "used": "1.0"}) + b"\n")
    only = "; from now on that is only counted, in /metrics"
    biased = '{"0":5,"1":5,"2":5,"3":5,"4":5,"5":5,"6"…'
    assert shown(tmp_path) == [
        f"a.1  logprobs true of the request was left out{only}",
        f"a.1  presence_penalty 1.5 of the request was left out{only}",
        f"a.1  logit_bias {biased} of the request was left out{only}",
        f"a.1  temperature 0.1 of the request was replaced by the recipe's 1.0{only}",
        f"a.2  top_p 0.5 of the request was replaced by the recipe's 1.0{only}",
    ]
    assert 'workbench_overridden_fields_total{field="temperature"} 3.0' in (await agent.get("/metrics")).text


async def test_a_flood_of_refusals_is_a_few_lines_and_a_file_of_bounded_size(
    agent: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(refused_log.time, "monotonic", lambda: now[0])
    for _ in range(3 * refused_log.BURST):
        await agent.post(CHAT.format("a.1"), json=ASK | {"n": 2})
    lines = shown(tmp_path)
    assert len(lines) == refused_log.BURST + 1
    assert lines[-1] == "REFUSED more; of the next 10 s they are counted and told later"
    counted = (await agent.get("/metrics")).text
    assert f'workbench_refused_total{{code="not_capturable"}} {3.0 * refused_log.BURST}' in counted
    now[0] += refused_log.WINDOW_S
    await agent.post(CHAT.format("a.1"), json=ASK | {"n": 2})
    more = f"a.1  REFUSED 400 not_capturable: {2 * refused_log.BURST} more"
    assert shown(tmp_path)[-2:] == [more, lines[0]]
    monkeypatch.setattr(refused_log, "MOST_BYTES", 1)
    await agent.post(CHAT.format("a.1"), json=ASK | {"n": 2})
    assert len(shown(tmp_path)) == refused_log.BURST + 3


async def test_what_was_only_counted_is_told_when_the_window_is_over_though_nobody_asks_again(
    agent: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_log, "WINDOW_S", 0.5)
    for _ in range(2 * refused_log.BURST):
        await agent.post(CHAT.format("a.1"), json=ASK | {"n": 2})
    path = tmp_path / REFUSED_FILE

    def told() -> int:
        return sum(line.get("times", "status" in line) for line in scan_lines(path).rows)

    # The gateway is not closed, as where it is killed.
    await until(lambda: told() == 2 * refused_log.BURST, "the counts are in the file")


async def test_a_file_of_refusals_that_is_full_says_so_once_and_so_does_the_run(
    agent: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_log, "MOST_BYTES", 300)
    for _ in range(5):
        await agent.post(CHAT.format("a.1"), json=ASK | {"n": 2})
    *_, last = shown(tmp_path)
    assert last == "REFUSED more is only counted from now on, in /metrics: the file of refusals is full (300 bytes)"
    lines = scan_lines(tmp_path / REFUSED_FILE).rows
    assert [line.get("full_at_bytes") for line in lines[-2:]] == [None, 300] and len(lines) < 5
    refused = refused_frame(lines, pl.DataFrame(schema={"rollout_id": pl.String, "detail": pl.String}))
    told = refused_words(refused, cut=is_cut(lines))
    assert told is not None and told.startswith(f"at least {len(lines) - 1} in 1 rollout: not_capturable")
    assert told.endswith("; refused.jsonl was full then, later ones are not in it")


async def test_every_refusal_of_a_flood_is_counted_with_its_rollout(tmp_path: Path) -> None:
    path = tmp_path / REFUSED_FILE
    settings = GatewaySettings(
        ledger_dir=str(tmp_path / "ledger"), worker_url="http://127.0.0.1:9", refused_path=str(path)
    )
    gateway = Gateway(settings, "control", "worker")
    transport = httpx.ASGITransport(gateway.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for number in range(3 * refused_log.BURST):
            asked = {"n": 2} if number % 2 else {"messages": [{"role": "user", "text": "hi"}]}
            await client.post(CHAT.format(f"a.{number % 3}"), json=ASK | asked)
    await gateway.close()
    counted = refused_frame(scan_lines(path).rows, pl.DataFrame(schema={"rollout_id": pl.String, "detail": pl.String}))
    assert dict(counted.group_by("rollout_id").agg(pl.col("requests").sum()).iter_rows()) == {
        f"a.{number}": refused_log.BURST for number in range(3)
    }
    assert set(counted["code"]) == {"not_capturable", "content_not_read"} and set(counted["by"]) == {"gateway"}


def test_a_line_that_is_still_being_written_is_shown_once_it_is_whole(tmp_path: Path) -> None:
    lines: list[str] = []
    follower = RefusalLines(tmp_path, lines.append)
    follower.look()
    line = {"at": 1.0, "rollout_id": "my-1", "status": 409, "code": "rollout_frozen", "message": "It is closed."}
    whole = orjson.dumps(line) + b"\n"
    for part in (whole[:20], whole[20:-1], whole[-1:], whole):
        with (tmp_path / REFUSED_FILE).open("ab") as file:
            file.write(part)
        follower.look()
    assert lines == [line_of(line)] * 2
