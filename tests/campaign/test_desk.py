"""Serving without Ray: the desk's socket, what `--terminal` means, the lines of calls, a start that is cut short."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from stored_run import make_run

from workbench import dataplane, runs
from workbench.campaign.served import desk_socket
from workbench.campaign.served.ask_receipt import verdict_text
from workbench.campaign.served.call_lines import CallLines, Facts
from workbench.campaign.served.desk import ReceiptAsked, ReceiptDesk, Verdict, checked_group, response_id_of
from workbench.campaign.served.serve import _Session, last_words
from workbench.config import load_recipe
from workbench.errors import DeadlineExceeded, RunStoreError, SetupError, WorkbenchError
from workbench.finalizer.messages import FinalizedGroup
from workbench.inspect import PrefixChain
from workbench.ledger import LedgerStore
from workbench.runs.writer import RunWriter
from workbench.wire import CallRecord, RolloutCommit


async def test_an_answer_or_the_line_of_an_error_comes_back_with_its_exit_code() -> None:
    async def handle(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "refuse":
            raise SetupError("not like that")
        if request["do"] == "fail":
            raise ZeroDivisionError("oh")
        return {"said": request["do"]}

    async with desk_socket.listening(handle) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        long = "ä" * 100_000
        assert await asyncio.to_thread(desk_socket.ask, str(path), {"do": long}, 5.0) == {"said": long}
        for do, says, code in (("refuse", "not like that", 2), ("fail", "ZeroDivisionError: oh", 1)):
            with pytest.raises(WorkbenchError, match=says) as refused:
                await asyncio.to_thread(desk_socket.ask, str(path), {"do": do}, 5.0)
            assert refused.value.exit_code == code
        for line in (b"no json\n", b"[1]\n"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(line)
            assert b"Expected one JSON" in await asyncio.wait_for(reader.readline(), 5.0)
            writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.to_thread(desk_socket.ask, str(path), {"do": "x"}, 5.0)
    assert not path.parent.exists()


async def test_a_server_that_does_not_answer_is_a_deadline() -> None:
    async def never(request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async with desk_socket.listening(never) as path:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
            await asyncio.to_thread(desk_socket.ask, str(path), {}, 0.2)


def record(call_id: str, parent: CallRecord | None = None) -> CallRecord:
    before = parent.cum_len if parent else 0
    return CallRecord(
        model_call_id=call_id,
        parent_call_id=parent.model_call_id if parent else None,
        mode="token_in" if parent else "text",
        prev_len=before,
        delta_len=7,
        cum_len=before + 7,
        weight_version=0,
        digest="1" * 64,
        extras_digest="2" * 64,
        chain_hash="3" * 64,
        cumulative_hash=("4" if parent else "5") * 64,
        staging_key=f"r.1/{call_id}",
        response_id=f"chatcmpl-{call_id}",
        admitted_at=1.0,
        fingerprint_version=2,
    )


def test_a_terminal_is_named_by_its_response_its_call_or_the_beginning_of_that() -> None:
    records = [record("abc1"), record("abc2"), record("ffff")]
    assert response_id_of(records, "chatcmpl-abc2") == "chatcmpl-abc2"
    assert response_id_of(records, "abc1") == "chatcmpl-abc1"
    assert response_id_of(records, "ff") == "chatcmpl-ffff"
    # What names none, or several, is left as it is: the receipt then says that it was not captured.
    assert response_id_of(records, "abc") == "abc"
    assert response_id_of(records, "nobody") == "nobody"


async def test_every_call_has_one_line_with_its_parent_or_its_cause(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    shown: list[str] = []

    async def facts(call_ids: Sequence[str]) -> Facts:
        return {call_id: {"sampled_tokens": 2, "finish_reason": "stop"} for call_id in call_ids if call_id != "second"}

    lines = CallLines(store.directory, facts, shown.append)
    await lines.look()
    user = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": "ho"}
    first = record("first")
    store.record(RolloutCommit(rollout_id="r.1", record=first, staging_chain=[first.staging_key]), [user], [said])
    await lines.look()
    second = record("second", first)
    chain = [first.staging_key, second.staging_key]
    store.record(RolloutCommit(rollout_id="r.1", record=second, staging_chain=chain), [user, said, user], [said])
    store.admit("r.1", [user, {"role": "assistant", "content": "changed"}, user], "third")
    await lines.look()
    await lines.look()
    (store.directory / "r.2.lineage.jsonl").write_bytes(b"no json\n{}\n")
    await lines.look()
    await lines.look()
    assert shown[:3] == [
        "r.1  first  text  root  5 + 2 tokens  stop",
        "r.1  second  token_in  after first  7 tokens",
        "r.1  third  NOT CAPTURED: unresolved_parent  assistant_text_changed  nearest call second, item 1 (from 0)",
    ]
    assert len(shown) == 4 and shown[3].startswith("r.2  its ledger cannot be read")
    assert (lines.calls, lines.captured, lines.rollouts) == (3, 2, {"r.1"})


STUCK_START = """
import asyncio, sys, time
from pathlib import Path
from workbench.campaign.fleet import Fleet
from workbench.campaign.served.serve import serve
from workbench.config import load_recipe

async def start_ray(self):
    Path(sys.argv[1], "starting").touch()
    await asyncio.to_thread(time.sleep, 600)

Fleet._start_ray = start_ray
serve(load_recipe("cpu_smoke"), Path(sys.argv[1], "run"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_cut_short_ends_although_a_thread_of_it_does_not(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK_START, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "starting").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert process.returncode == 128 + number, said
    name = signal.Signals(number).name
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else name
    happened = f"stopped by {name} while it was still starting ray"
    assert f"stopping on {name}\n" in said
    assert said.splitlines()[-1] == f"{happened}: nothing was served, and no call captured"
    campaign = runs.open(tmp_path / "run").campaign
    assert campaign.select("state", "error").row(0) == ("stopped", happened)


ENDS_BY_ITSELF = """
import asyncio, sys
from pathlib import Path
from workbench.campaign.fleet import Fleet
from workbench.campaign.served.serve import serve
from workbench.config import load_recipe
from workbench.errors import ComponentDied, WorkbenchError

async def stop():
    Path(sys.argv[1], "stopping").touch()
    while not Path(sys.argv[1], "go").exists():
        await asyncio.sleep(0.02)

async def start_ray(self):
    self._stops.append(("ray", stop))
    raise ComponentDied("Ray broke")

Fleet._start_ray = start_ray
try:
    serve(load_recipe("cpu_smoke"), Path(sys.argv[1], "run"))
except WorkbenchError as error:
    sys.exit(f"told: {error}")
"""


def test_an_interrupt_while_it_ends_by_an_error_is_not_taken_for_the_end(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDS_BY_ITSELF, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "stopping").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # nothing can be waited for: the signal must change nothing
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert (process.returncode, said.splitlines()[-1]) == (1, "told: Ray broke"), said
    campaign = runs.open(tmp_path / "run").campaign
    assert campaign.select("state", "error").row(0) == ("failed", "ComponentDied: Ray broke")


def test_the_last_words_of_a_served_run_count_what_was_captured() -> None:
    lines: Any = SimpleNamespace(calls=0, captured=0, rollouts=set())
    run = Path("reports/agent")
    assert (
        last_words(run, lines, 0, [])
        == "stopped after it served; no call came. The run: workbench inspect reports/agent"
    )
    lines.calls, lines.captured, lines.rollouts = 7, 6, {"a", "b"}
    assert last_words(run, lines, 1, ["b"]).splitlines() == [
        "stopped after it served 2 rollouts with 7 calls: 6 captured, 1 rollout with a receipt",
        "  look      workbench inspect reports/agent",
        "  without a receipt, and so without tokens now: b",
    ]
    lines.calls = lines.captured = 1
    lines.rollouts = {"a"}
    assert last_words(run, lines, 1, []).splitlines()[0].startswith("stopped after it served 1 rollout with 1 call: 1 ")


async def test_who_leaves_before_the_answer_or_says_too_much_is_told_nothing_and_the_next_one_is_answered() -> None:
    async def handle(request: Any) -> Any:
        return {"verdict": "kept"}

    async with desk_socket.listening(handle) as path:
        _, writer = await asyncio.open_unix_connection(str(path))
        with contextlib.suppress(ConnectionError):
            writer.write(b"x" * (desk_socket.LONGEST_LINE + 2))
            await writer.drain()
        writer.close()
        assert await asyncio.to_thread(desk_socket.ask, str(path), {"rollouts": ["a"]}, 10.0) == {"verdict": "kept"}


async def test_a_server_that_closes_without_an_answer_is_an_error_and_no_wait(tmp_path: Path) -> None:
    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    path = tmp_path / "desk"
    async with await asyncio.start_unix_server(closes, str(path)):
        with pytest.raises(ConnectionError, match="closed the connection before it answered"):
            await asyncio.to_thread(desk_socket.ask, str(path), {}, 10.0)


async def test_lines_of_a_ledger_that_is_not_there_yet_and_the_last_ones_are_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    came = asyncio.Event()

    async def facts(call_ids: Any) -> dict[str, Any]:
        return {}

    def show(line: str) -> None:
        shown.append(line)
        came.set()

    lines = CallLines(tmp_path / "ledger", facts, show)
    follower = asyncio.create_task(lines.follow())
    store = LedgerStore(tmp_path / "ledger")
    row = record("c0")
    store.record(RolloutCommit(rollout_id="my-1", record=row, staging_chain=[row.staging_key]), [], [])
    await asyncio.wait_for(came.wait(), 10)
    follower.cancel()
    await asyncio.wait([follower])
    row = record("c1")
    store.record(RolloutCommit(rollout_id="my-1", record=row, staging_chain=[row.staging_key]), [], [])
    lines.last_look()
    assert len(shown) == 2 and lines.calls == 2


def test_a_receipt_counts_calls_as_inspect_does(tmp_path: Path) -> None:
    run = runs.open(make_run(tmp_path / "stored", steps=1))
    row = run.rollouts.filter(pl.col("unresolved_calls") == 1).row(0, named=True)
    known = {"verified": False, "calls": row["calls"], "failed_calls": row["failed_calls"]}
    why = {"cause": "unresolved_parent", "detail": "assistant_text_changed"}
    fields: dict[str, Any] = dict.fromkeys(Verdict.model_fields) | known | why
    verdict = Verdict.model_construct(**fields)
    total = row["calls"] + 1
    said = verdict_text(verdict, tmp_path)
    assert f"calls     {total}: {row['calls']} captured, 1 not captured\n" in said
    assert "detail    assistant_text_changed (the model's own text came back changed)\n" in said
    assert f"· {total} calls ·" in repr(PrefixChain(run, row["rollout_id"]))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"chain": 2, "calls": 2, "failed_calls": 2}, "4: 2 in the chain, 2 not captured"),
        ({"chain": 2, "calls": 3, "failed_calls": 0}, "3: 2 in the chain, 1 captured beside it"),
        ({"chain": 1, "calls": 1, "failed_calls": 0}, "1: 1 in the chain"),
    ],
)
def test_a_verified_receipt_counts_every_call_once(counts: dict[str, int], said: str) -> None:
    fields = dict.fromkeys(Verdict.model_fields) | {"verified": True, "tokens": 9, "sampled_tokens": 3} | counts
    assert f"  calls     {said}\n" in verdict_text(Verdict.model_construct(**fields), Path("run"))


@pytest.mark.parametrize(
    ("selection", "others", "said"),
    [
        (
            "heuristic",
            2,
            "nobody named one\n            2 other conversations of this rollout left out; --terminal names",
        ),
        ("heuristic", 0, "chosen by heuristic from the parent links, nobody named one\n  calls"),
        ("declared", 2, "declared\n  calls"),
    ],
)
def test_a_receipt_says_that_its_last_call_was_guessed_and_what_was_left_out(
    selection: str, others: int, said: str
) -> None:
    counts = {"chain": 2, "calls": 2 + others, "failed_calls": 0, "other_roots": others, "selection": selection}
    fields = dict.fromkeys(Verdict.model_fields) | {"verified": True, "tokens": 9, "sampled_tokens": 3} | counts
    assert said in verdict_text(Verdict.model_construct(**fields), Path("run"))


async def test_a_desk_that_guesses_nothing_asks_for_the_last_call_before_anything_is_closed(tmp_path: Path) -> None:
    nobody: Any = None
    desk = ReceiptDesk(tmp_path, nobody, nobody, nobody, named_only=True)
    with pytest.raises(SetupError, match=r"last call of one, and rollouts\.require_terminal_witness .*--terminal"):
        await desk.receipt({"rollouts": ["one", "two"]})


def test_a_group_that_cannot_be_a_file_is_refused_as_a_group():
    with pytest.raises(SetupError, match=r"^--group \.\./x: expected 1-200 characters"):
        checked_group(ReceiptAsked(rollouts=["a"], group="../x"))


async def test_what_no_receipt_was_ever_asked_with_and_a_group_that_is_stored_are_refused(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    for rollout_id in ("one", "two"):
        row = record("c0")
        store.record(RolloutCommit(rollout_id=rollout_id, record=row, staging_chain=[row.staging_key]), [], [])

    class Control:
        async def manifest(self, rollout_id: str) -> Any:
            return store.manifest(rollout_id)

    control: Any = Control()
    never: Any = None
    desk = ReceiptDesk(tmp_path, control, never, never)
    with pytest.raises(SetupError, match="wishes"):
        await desk.receipt({"rollouts": ["one"], "wishes": 3})
    with pytest.raises(
        RunStoreError, match=r"Rollout none has no call in this run; those without a receipt: one, two$"
    ):
        await desk.receipt({"rollouts": ["none"]})
    desk.finalised["two"] = "g1"
    with pytest.raises(RunStoreError, match=r"Group g1 is stored already\. Next: choose another --group"):
        await desk.receipt({"rollouts": ["one"], "group": "g1"})


def test_a_stop_is_said_once_and_an_error_that_ends_it_says_that_it_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(tmp_path / "run") as writer:
        session = _Session(load_recipe("cpu_smoke"), tmp_path / "run", writer)
        session.stop(2)
        session._phase("stopping")
        session._phase("gateway did not stop")
        assert capsys.readouterr().err == "gateway did not stop\n"  # the signal's handler said it
        _Session(load_recipe("cpu_smoke"), tmp_path / "run", writer)._phase("stopping")
        assert capsys.readouterr().err == "stopping\n"


async def test_train_rows_that_cannot_be_cleared_cost_no_receipt_and_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FinalizedGroup(group_id="g1", weight_version=0, train_keys=["one"], rows=[], metrics={})

    async def finalize(request: Any) -> FinalizedGroup:
        return group

    async def clear(partition: str, keys: Sequence[str], *, deadline_s: float) -> None:
        raise DeadlineExceeded(f"clear of {keys} from {partition} took longer than {deadline_s:g} s")

    monkeypatch.setattr(dataplane, "clear", clear)
    fleet: Any = SimpleNamespace(finalizers=SimpleNamespace(finalize=finalize), model_path=tmp_path)
    request: Any = None
    with RunWriter(tmp_path / "run") as writer:
        session = _Session(load_recipe("cpu_smoke"), tmp_path / "run", writer)
        assert await session._finalize_with(fleet)(request) is group
    (told,) = runs.open(tmp_path / "run").events.filter(kind="train_rows_left")["fields"]
    assert "g1" in told and "clear of ['one'] from train took longer than" in told
