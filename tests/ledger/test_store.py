"""The store under crashes, rivals and bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from speech import commit, model, user

from workbench.errors import FingerprintError, LedgerConflict, LedgerCorrupt, RolloutFrozen, WireError
from workbench.ledger import LedgerStore
from workbench.ledger.journal import Journal
from workbench.wire import Cause, RolloutCommit

R = "run.0.0.0"


def ledger_of(store: LedgerStore) -> Path:
    return store.directory / f"{R}.lineage.jsonl"


def grown(store: LedgerStore, calls: int = 2) -> None:
    for number in range(calls):
        commit(store, R, f"c{number}", [user(f"question {number}")], [model(f"answer {number}")])


def test_a_line_cut_at_any_byte_was_never_acknowledged(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    grown(store)
    whole = ledger_of(store).read_bytes()
    first = whole.index(b"\n") + 1
    for cut in [*range(first, len(whole), 13), len(whole) - 1]:
        ledger_of(store).write_bytes(whole[:cut])
        torn = LedgerStore(tmp_path)
        assert [record.model_call_id for record in torn.manifest(R).records] == ["c0"]
        assert ledger_of(store).stat().st_size == cut, "reading repairs nothing"
    torn.record_failure(R, "c1", Cause.WORKER_CAPTURE_FAILED)
    assert ledger_of(store).read_bytes() == (
        whole[:first] + b'{"failure_reason":"worker_capture_failed","model_call_id":"c1"}\n'
    )


def test_a_row_is_on_disk_before_record_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut cannot be had in a test; the order of write and fsync can."""
    synced: list[bytes] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.name.endswith(".lineage.jsonl"):
            synced.append(path.read_bytes())

    monkeypatch.setattr("workbench.ledger.journal.os.fsync", fsync)
    store = LedgerStore(tmp_path)
    grown(store, 1)
    assert synced[-1:] == [ledger_of(store).read_bytes()]
    store.record_failure(R, "c9", Cause.WORKER_CAPTURE_FAILED)
    assert synced[-1:] == [ledger_of(store).read_bytes()]


def test_a_store_that_is_running_sees_a_torn_line_go(tmp_path: Path) -> None:
    store, rival = LedgerStore(tmp_path), LedgerStore(tmp_path)
    grown(store, 1)
    with ledger_of(store).open("ab") as file:
        file.write(b'{"model_call_id":"cra')
    assert len(store.manifest(R).records) == len(rival.manifest(R).records) == 1
    rival.record_failure(R, "c1", Cause.WORKER_CAPTURE_FAILED)
    assert [failure.model_call_id for failure in store.manifest(R).failures] == ["c1"]


def test_a_store_that_is_running_sees_a_ledger_go(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    grown(store)
    assert len(store.manifest(R).records) == 2
    ledger_of(store).unlink()
    assert store.manifest(R).records == []


def test_a_store_remembers_some_rollouts_and_reads_the_others_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.ledger.store.INDEXED_ROLLOUTS", 2)
    store = LedgerStore(tmp_path)
    names = [f"run.0.{number}.0" for number in range(4)]
    for name in names:
        commit(store, name, "c0", [user("q")], [model("A")])
    assert len(store._rollouts) == 2
    for name in names:
        admission = store.admit(name, [user("q"), model("A"), user("more")], "c1").admission
        assert admission is not None and admission.parent_call_id == "c0"


@pytest.mark.parametrize("damage", [b"{\n", b"\x00\x00\x00\n", b"[1]\n", b'{"kind":"freeze"}\n', b"\n"])
def test_a_broken_whole_line_names_file_and_line(tmp_path: Path, damage: bytes) -> None:
    store = LedgerStore(tmp_path)
    grown(store)
    first, second = ledger_of(store).read_bytes().splitlines(keepends=True)
    ledger_of(store).write_bytes(first + damage + second)
    for reader in (store, LedgerStore(tmp_path)):
        for _ in range(2):
            with pytest.raises(LedgerCorrupt, match=rf"{R}.lineage.jsonl, line 2"):
                reader.manifest(R)
        with pytest.raises(LedgerCorrupt):
            reader.record_failure(R, "c9", Cause.WORKER_CAPTURE_FAILED)
        with pytest.raises(LedgerCorrupt):
            reader.admit(R, [user("hello")], "c9")
    assert store.manifest("run.0.1.0").records == [], "other rollouts go on"


def test_a_flipped_byte_in_a_row_is_seen(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    grown(store)
    text = ledger_of(store).read_text()
    ledger_of(store).write_text(text.replace('"mode":"text"', '"mode":"texu"', 1))
    with pytest.raises(LedgerCorrupt, match=r"line 1: call c0 .* mode"):
        store.manifest(R)


def test_a_row_without_a_hash_is_a_failure_of_its_call(tmp_path: Path) -> None:
    grown(LedgerStore(tmp_path), 3)
    path = ledger_of(LedgerStore(tmp_path))
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    rows[0]["failure_reason"] = None  # an empty column, no failure
    del rows[1]["cumulative_hash"]
    rows[2]["chain_hash"] = ""
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    manifest = LedgerStore(tmp_path).manifest(R)
    assert [record.model_call_id for record in manifest.records] == ["c0"]
    assert [(failure.model_call_id, failure.reason) for failure in manifest.failures] == [
        ("c1", "ledger_row_missing_chain_hash"),
        ("c2", "ledger_row_missing_chain_hash"),
    ]


def test_the_same_row_again_is_nothing_and_another_is_a_conflict(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    grown(store, 1)
    before = ledger_of(store).read_bytes()
    grown(store, 1)
    assert ledger_of(store).read_bytes() == before
    with pytest.raises(LedgerConflict, match="c0"):
        commit(store, R, "c0", [user("another question")], [model("answer 0")])
    with pytest.raises(LedgerConflict, match="c0"):
        store.record_failure(R, "c0", Cause.WORKER_CAPTURE_FAILED)
    store.record_failure(R, "c1", Cause.UNRESOLVED_PARENT, "history_edited")
    store.record_failure(R, "c1", Cause.UNRESOLVED_PARENT)
    with pytest.raises(LedgerConflict, match="unresolved_parent"):
        store.record_failure(R, "c1", Cause.WORKER_CAPTURE_FAILED)
    with pytest.raises(LedgerConflict):
        commit(store, R, "c1", [user("question 1")], [model("answer 1")])


def test_frozen_is_frozen_for_every_process(tmp_path: Path) -> None:
    store, rival = LedgerStore(tmp_path), LedgerStore(tmp_path)
    grown(store, 1)
    manifest = store.freeze(R)
    before = ledger_of(store).read_bytes()
    assert rival.frozen(R) and rival.freeze(R) == manifest
    with pytest.raises(RolloutFrozen):
        rival.admit(R, [user("hello")], "c1")
    with pytest.raises(RolloutFrozen):
        commit(rival, R, "c1", [user("late")], [model("too late")])
    with pytest.raises(RolloutFrozen):
        rival.record_failure(R, "c2", Cause.WORKER_CAPTURE_FAILED)
    grown(rival, 1)  # a row that is there already is no late commit
    assert ledger_of(store).read_bytes() == before
    assert [(event["kind"], event["model_call_id"]) for event in store.events(R)] == [
        ("late_commit", "c1"),
        ("late_failure", "c2"),
    ]
    assert store.manifest(R) == manifest


def test_admission_follows_the_three_outcomes(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    seeded = [user("hello"), model("a history from elsewhere"), user("go on")]
    root = store.admit(R, seeded, "c0").admission
    assert root is not None and (root.mode, root.parent_call_id, root.prev_len) == ("text", None, 0)
    record = commit(store, R, "c0", seeded, [model("my answer")])
    child = store.admit(R, [*seeded, model("my answer"), user("more")], "c1").admission
    assert child is not None
    assert (child.mode, child.parent_call_id, child.prev_len) == ("token_in", "c0", record.cum_len)
    assert (child.staging_chain, child.parent_chain_hash) == ([f"{R}/c0"], record.chain_hash)
    lost = store.admit(R, [user("hello"), model("never said"), user("go on")], "c2")
    assert lost.admission is None and lost.drift is not None
    assert [failure.model_call_id for failure in store.manifest(R).failures] == ["c2"]


def test_failure_rows_count_as_rows_so_no_history_is_seeded_after_them(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    store.record_failure(R, "c0", Cause.WORKER_CAPTURE_FAILED)
    assert store.admit(R, [user("hello"), model("said but not captured"), user("go on")], "c1").admission is None


def test_a_request_that_repeats_a_call_does_not_continue_it(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    root = commit(store, R, "c0", [user("hello")], [model("yes")])
    ask = [user("hello"), model("yes"), user("more")]
    # A child with nothing but an end-of-turn token has its parent's fingerprint.
    commit(store, R, "c1", ask, [model("")], parent=root, chain=[f"{R}/c0"])
    admitted = store.admit(R, ask, "c2").admission
    assert admitted is not None and admitted.parent_call_id == "c0"
    # By the contract alone both calls match, and nobody says which.
    raw = store.resolve(R, ask)
    assert (raw.status, raw.candidates) == ("unresolved", ("c0", "c1"))


def test_a_silent_call_is_resolved_to_itself_by_the_contract_alone(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    seeded = [user("hello"), model("from elsewhere"), user("go on")]
    commit(store, R, "c0", seeded, [{"type": "reasoning", "summary": []}])
    assert store.resolve(R, seeded).parent == "c0"
    assert store.admit(R, seeded, "c1").admission is None


def test_rows_are_spelled_as_other_writers_spell_them(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    store.record_failure(R, "é", "ünresolved 😀")
    expected = r'{"failure_reason":"\u00fcnresolved \ud83d\ude00","model_call_id":"\u00e9"}' + "\n"
    assert ledger_of(store).read_bytes() == expected.encode()
    assert LedgerStore(tmp_path).manifest(R).failures[0].reason == "ünresolved 😀"
    record = commit(store, R, "c0", [user("q")], [model("A")], admitted_at=1e-05)
    assert b'"admitted_at":1e-05,' in ledger_of(store).read_bytes().splitlines()[1]
    assert LedgerStore(tmp_path).manifest(R).records == [record]


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    with pytest.raises(ValueError, match="surrogate"):
        store.record_failure(R, "c0", "half a pair \ud83d")
    assert ledger_of(store).read_bytes() == b""
    store.record_failure(R, "c0", Cause.WORKER_CAPTURE_FAILED)
    assert [failure.model_call_id for failure in LedgerStore(tmp_path).manifest(R).failures] == ["c0"]


def test_a_row_that_no_reader_would_take_is_refused_before_it_is_written(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    record = commit(store, R, "c0", [user("q")], [model("A")])
    written = ledger_of(store).read_bytes()
    other = record.model_copy(update={"model_call_id": "c1", "staging_key": f"{R}/c1"})
    with pytest.raises(WireError, match="staging_chain"):
        store.record(RolloutCommit(rollout_id=R, record=other), [user("q")], [model("B")])
    for call_id, reason in (("", "worker_capture_failed"), ("c1", "")):
        with pytest.raises(WireError, match="failure row"):
            store.record_failure(R, call_id, reason)
    assert ledger_of(store).read_bytes() == written
    assert store.manifest(R) == LedgerStore(tmp_path).manifest(R)


def test_fingerprints_of_another_version_match_nothing(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("A")], fingerprint_version=1)
    assert store.resolve(R, [user("q"), model("A"), user("more")]).status == "unresolved"


def test_template_arguments_are_part_of_the_context(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    ask = [user("hello"), model("yes"), user("more")]
    commit(store, R, "c0", [user("hello")], [model("yes")], prompt_options={"chat_template_kwargs": {"think": True}})
    assert store.resolve(R, ask, {"chat_template_kwargs": {"think": True}}).status == "resolved"
    assert store.resolve(R, ask).status == "unresolved"
    assert store.admit(R, ask, "c1").drift.cause == Cause.TOOLS_CHANGED  # type: ignore[union-attr]


def test_identical_sequences_are_one_candidate_and_different_ones_are_ambiguous(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    ask = [user("hello"), model("yes"), user("more")]
    commit(store, R, "b", [user("hello")], [model("yes")], sequence="same")
    commit(store, R, "a", [user("hello")], [model("yes")], sequence="same")
    assert store.resolve(R, ask).parent == "a"
    commit(store, R, "c", [user("hello")], [model("yes")], sequence="other")
    lost = store.admit(R, ask, "d")
    assert lost.drift is not None and lost.drift.cause == Cause.DUPLICATE_OUTPUT


@pytest.mark.parametrize("rollout_id", ["", ".", "..", "../up", "a/b", "a b", "x" * 201, "a\n", "é", None, 7])
def test_a_bad_rollout_id_never_reaches_a_path(tmp_path: Path, rollout_id: object) -> None:
    store = LedgerStore(tmp_path)
    for act in (store.manifest, store.freeze, store.frozen, store.events, lambda r: store.admit(r, [], "c")):
        with pytest.raises(WireError):
            act(rollout_id)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_items_without_a_fingerprint_are_refused_before_anything_is_generated(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError):
        LedgerStore(tmp_path).admit(R, [{"role": "user", "content": 3}], "c0")


def test_a_look_up_reads_no_row_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LedgerStore(tmp_path)
    grown(store, 100)
    taken: list[int] = []
    inner = Journal._take
    monkeypatch.setattr(
        Journal, "_take", lambda self, value, line: (taken.append(self._lines + 1), inner(self, value, line))
    )
    ask = [user("question 7"), model("answer 7"), user("more")]
    for _ in range(50):
        assert store.resolve(R, ask).parent == "c7"
    assert taken == []
    LedgerStore(tmp_path).record_failure(R, "late", Cause.WORKER_CAPTURE_FAILED)
    taken.clear()
    assert store.resolve(R, ask).parent == "c7"
    assert taken == [101], "of what another process added, only that is read"


def test_processes_that_share_a_directory_lose_no_row(tmp_path: Path) -> None:
    script = (
        "import sys; from workbench.ledger import LedgerStore\n"
        "store, who = LedgerStore(sys.argv[1]), sys.argv[2]\n"
        f"for n in range(40): store.record_failure({R!r}, f'{{who}}-{{n}}', 'worker_capture_failed')\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), f"w{number}"], env=dict(os.environ))
        for number in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = (tmp_path / f"{R}.lineage.jsonl").read_bytes().splitlines()
    rows = [orjson.loads(line)["model_call_id"] for line in lines]
    assert sorted(rows) == sorted(f"w{who}-{number}" for who in range(3) for number in range(40))
    assert [r for r in rows if r.startswith("w1")] == [f"w1-{number}" for number in range(40)]


def test_a_turn_without_content_is_not_passed_over(tmp_path: Path) -> None:
    """The second call said nothing and is not in custody: its continuation must not be taken for the first call's."""
    store = LedgerStore(tmp_path)
    asked, said = [user("a")], [model("b")]
    commit(store, R, "c1", asked, said)
    store.record_failure(R, "c2", Cause.WORKER_CAPTURE_FAILED)
    after = [*asked, *said, user("c"), model(""), user("d")]
    assert store.admit(R, after, "c3").resolution.status == "unresolved"
    assert store.admit(R, [*asked, *said, model(""), user("d")], "c4").resolution.parent == "c1"


def test_a_request_that_names_a_response_continues_its_call_or_none(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    asked, said = [user("a")], [model("b")]
    for call_id in ("c1", "c2"):
        commit(store, R, call_id, asked, said)
    after = [*asked, *said, user("c")]
    assert store.admit(R, after, "c3").resolution.status == "unresolved"
    assert store.admit(R, after, "c4", after_response_id="resp-c2").resolution.parent == "c2"
    assert store.admit(R, after, "c5", after_response_id="resp-c9").resolution.status == "unresolved"
    assert store.admit(R, [user("x"), *said], "c6", after_response_id="resp-c2").resolution.status == "unresolved"
    for rollout_id in (R, "run.0.1.0"):
        for request in (asked, after):
            named = store.admit(rollout_id, request, f"{len(request)}", after_response_id="resp-c9")
            assert named.admission is None, "never a root, not even in a rollout without calls"


def test_a_call_is_admitted_again_as_it_was_and_not_to_a_parent_without_a_row(tmp_path: Path) -> None:
    """For whoever finishes a call that another process admitted."""
    store = LedgerStore(tmp_path)
    commit(store, R, "c0", [user("q")], [model("A")])
    child = [user("q"), model("A"), user("more")]
    assert store.readmit(R, "c1", "c0") == store.admit(R, child, "c1").admission
    assert store.readmit(R, "c2", None) == store.admit(R, [user("q")], "c2").admission
    with pytest.raises(LedgerConflict, match="c3 was resolved to call gone, which has no custody row"):
        store.readmit(R, "c3", "gone")


def test_a_compaction_of_a_response_that_two_calls_gave_is_of_neither(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    first = commit(store, R, "c0", [user("q")], [model("A")])
    other = first.model_copy(update={"model_call_id": "c1", "staging_key": f"{R}/c1", "cumulative_hash": "1" * 64})
    row = RolloutCommit(rollout_id=R, record=other, staging_chain=[f"{R}/c1"])
    assert store.admit(R, [user("short")], "c2", replaces_response_id="resp-c0").compaction_of == "c0"
    store.record(row, [user("q")], [model("B")])
    admitted = store.admit(R, [user("short")], "c3", replaces_response_id="resp-c0")
    assert (admitted.admission, admitted.resolution.status) == (None, "unresolved")


def test_reasoning_between_two_items_of_a_turn_does_not_end_it(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    called = {"type": "function_call", "call_id": "t1", "name": "search", "arguments": "{}"}
    answer = [model("I look it up."), thought, called]
    commit(store, R, "c0", [user("q")], answer)
    result = {"type": "function_call_output", "call_id": "t1", "output": "found"}
    admitted = store.admit(R, [user("q"), *answer, result], "c1").admission
    assert admitted is not None and admitted.parent_call_id == "c0"
