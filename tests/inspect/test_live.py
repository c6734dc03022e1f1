"""Live views: the same object as the snapshot, bounded, and without anything fetched or executed on the way."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import numpy as np
import orjson
import polars as pl
import pytest
from stored_run import END, START, StoredRun, encode, make_run

from workbench import runs
from workbench.inspect import (
    LogprobDelta,
    PoisonTable,
    PrefixChain,
    TokenStrip,
    display_mode,
    set_mode,
    telling_rollout,
)
from workbench.inspect.custody import custody_of
from workbench.inspect.live.pack import pack, unpack
from workbench.inspect.live.widget import JS, module
from workbench.inspect.routes import route_spans
from workbench.inspect.snapshot import WIDGET_MIME

FOREIGN = Path(__file__).parents[1] / "conformance" / "foreign_ledger" / "ledger"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> runs.Run:
    return runs.open(make_run(tmp_path_factory.mktemp("live") / "stored"))


@pytest.fixture
def published(monkeypatch) -> list[dict]:
    seen: list[dict] = []
    monkeypatch.setattr("IPython.display.publish_display_data", lambda data, metadata=None: seen.append(data))
    yield seen
    set_mode(None)


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("live", [WIDGET_MIME]),
        ("static", ["image/png", "text/html"]),
        ("both", [WIDGET_MIME, "image/png", "text/html"]),
    ],
)
def test_the_mode_says_what_a_notebook_shows(run, published, mode, kinds):
    set_mode(mode)
    chain = PrefixChain(run, telling_rollout(run))
    assert chain.live.chain.fallbacks == 0
    chain._ipython_display_()
    assert chain.live.chain.fallbacks == (2 if mode == "both" else 0)
    assert [set(data) - {"text/plain"} for data in published] == [{kind} for kind in kinds]
    assert {data["text/plain"] for data in published} == {repr(chain)}


def test_the_environment_says_the_mode_and_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.delenv("WORKBENCH_DISPLAY", raising=False)
    assert display_mode() == "both"
    monkeypatch.setenv("WORKBENCH_DISPLAY", "static")
    assert display_mode() == "static"
    monkeypatch.setenv("WORKBENCH_DISPLAY", "statik")
    with pytest.raises(ValueError, match=r"live, static, both.*statik"):
        display_mode()


def test_widgets_refuse_unknown_keywords_and_have_no_address_in_their_repr(run):
    from workbench.inspect.live.strip import StripWidget

    with pytest.raises(TypeError, match="did you mean 'sentence'"):
        StripWidget(sentense="x")
    strip = TokenStrip(run, telling_rollout(run))
    assert repr(strip.live) == repr(strip) and "0x" not in repr(PrefixChain(run, strip.rollout_id).live)
    assert strip.live is strip.live


def test_a_block_comes_back_as_it_was():
    columns = {
        "a": np.arange(5, dtype=np.uint16),
        "b": np.array([-1.5, np.nan], np.float32),
        "ids": np.array([2**64 - 1], np.uint64),
    }
    meta, back = unpack(pack({"n": 5, "words": ["é"]}, columns))
    assert meta == {"n": 5, "words": ["é"]}
    for name, column in columns.items():
        assert back[name].dtype == column.dtype and np.array_equal(back[name], column, equal_nan=name == "b")
    with pytest.raises(ValueError, match="column a"):
        pack({}, {"a": np.zeros(2, dtype=bool)})


def test_the_live_strip_holds_every_id_and_logprob_bit_for_bit(run):
    for rollout_id in run.rollouts.filter(pl.col("sample_mask") == 1)["rollout_id"]:
        tokens = run.tokens(rollout_id)
        words, columns = unpack(TokenStrip(run, rollout_id).live.block)
        assert columns["ids"][columns["slot"]].tolist() == tokens["token_id"].to_list()
        sampled = (columns["flags"] & 1).astype(bool)
        assert sampled.tolist() == tokens["sampled"].to_list()
        for name, column in (("logprob", "logprob"), ("trainer", "trainer_logprob"), ("delta", "delta")):
            assert columns[name].tobytes() == tokens.filter("sampled")[column].to_numpy().tobytes()
        assert [start for start, *_ in words["calls"]] == [
            0,
            *np.flatnonzero(tokens["model_call_id"].rle_id().diff().to_numpy() == 1).tolist(),
        ]


def test_missing_signals_carry_their_reason(run):
    rejected = run.rollouts.filter(pl.col("cause") == "unresolved_parent")["rollout_id"][0]
    words, columns = unpack(TokenStrip(run, rejected).live.block)
    reasons = {key: reason for key, _, reason in words["signals"]}
    assert reasons["delta"] == "the trainer has not scored these tokens" and "delta" not in columns
    assert reasons["logprob"] is None and "routed experts" in reasons["route"]
    assert len(reasons) == 10


def test_router_agreement_is_a_byte_a_token_and_255_where_nothing_was_replayed(run):
    tokens = run.tokens("stored.0.1.0")
    shares = [None, 0.0, 1.0, 1 / 3, *[None] * (tokens.height - 4)]
    words, columns = unpack(TokenStrip(tokens.with_columns(pl.Series("route_agreement", shares))).live.block)
    assert columns["agreement"].tolist() == [255, 0, 254, 85] + [255] * (tokens.height - 4)
    assert dict((key, reason) for key, _, reason in words["signals"])["agreement"] is None


def test_a_split_character_is_one_piece_and_a_literal_control_id_is_flagged():
    ids = encode("<|im_start|>user\nstop <|im_end|> or 🎲?<|im_end|>\n<|im_start|>assistant\n") + encode("é<|im_end|>")
    first_end = ids.index(END)
    frame = pl.DataFrame(
        {
            "rollout_id": "r",
            "model_call_id": "c",
            "position": range(len(ids)),
            "token_id": pl.Series(ids, dtype=pl.UInt64),
            "sampled": [i >= len(ids) - 3 for i in range(len(ids))],
            "logprob": pl.Series([0.0] * len(ids), dtype=pl.Float32),
            "trainer_logprob": pl.Series([None] * len(ids), dtype=pl.Float32),
            "delta": pl.Series([None] * len(ids), dtype=pl.Float32),
            "weight_version": 0,
        }
    )
    from stored_run import VOCABULARY

    strip = TokenStrip(frame, vocabulary=VOCABULARY)
    assert f"1 control id inside a span of content, dashed (at token {first_end})" in strip.html()
    words, columns = unpack(strip.live.block)
    assert [shown for _, _, shown, _ in words["joins"]] == ["🎲", "é"]
    assert np.flatnonzero(columns["flags"] & 2).tolist() == [first_end] and words["flagged"] == 1
    names = [words["role_names"][code] for _, code in words["roles"]]
    assert names == ["user", "other", "assistant"] and ids[words["roles"][2][0]] == START
    assert "\ufffd" not in "".join(words["texts"])


def test_the_live_chain_holds_every_call(run):
    for rollout_id in run.rollouts["rollout_id"]:
        chain = PrefixChain(run, rollout_id)
        words, columns = unpack(chain.live.chain.block)
        assert sorted(words["ids"]) == sorted(chain.calls["model_call_id"])
        for i, call_id in enumerate(words["ids"]):
            call = chain.calls.filter(pl.col("model_call_id") == call_id).row(0, named=True)
            parent = columns["parent"][i]
            attached = call["parent_call_id"] or call["near_call_id"]
            assert (words["ids"][parent] if parent >= 0 else None) == attached
            assert parent < i
            assert columns["cum_len"][i] == (words["unknown"] if call["cum_len"] is None else call["cum_len"])
            assert words["tables"]["relation"][columns["relation"][i]] == call["relation"]


def test_choosing_a_call_opens_its_tokens(run):
    chain = PrefixChain(run, "stored.0.1.0")
    live = chain.live
    assert live.tokens.block == b"" and "choose a call" in live.tokens.missing
    second = chain.calls.filter(pl.col("relation") == "chain")["model_call_id"][1]
    retry = chain.calls.filter(pl.col("relation") == "retry")["model_call_id"][0]
    for call_id, expected in ((second, run.tokens("stored.0.1.0")), (retry, run.tokens("stored.0.1.0", retry))):
        live.chain.selected = call_id
        _, columns = unpack(live.tokens.block)
        assert columns["ids"][columns["slot"]].tolist() == expected["token_id"].to_list()
        assert live.tokens.at == expected["model_call_id"].index_of(call_id) > 0


def test_a_call_without_tokens_says_why(run):
    live = PrefixChain(run, "stored.1.1.0").live
    lost = run.calls.filter((pl.col("rollout_id") == "stored.1.1.0") & (pl.col("relation") == "unresolved"))
    live.chain.selected = lost["model_call_id"][0]
    assert live.tokens.block == b"" and "no staged tokens" in live.tokens.missing


def test_requests_that_were_refused_are_in_the_live_causes_as_in_the_static_ones(tmp_path):
    stored = make_run(tmp_path / "run", steps=1)
    line = {"at": 1.0, "rollout_id": "run.0.0.0", "status": 400, "code": "not_capturable", "message": "n must be 1"}
    (stored / "refused.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    table = PoisonTable(runs.open(stored))
    causes = table.live.causes
    assert causes.refused_words in table.html() and causes.refused_words.endswith("1 in 1 rollout: not_capturable (1).")
    (told,) = causes.refused
    assert (told["code"], told["requests"], told["example"], told["message"]) == (
        "not_capturable",
        1,
        "run.0.0.0",
        "n must be 1",
    )


def test_choosing_a_rejected_rollout_opens_its_chain(run):
    table = PoisonTable(run)
    live = table.live
    assert [row["cause"] for row in live.causes.causes] == table.causes["cause"].to_list()
    assert len(live.causes.rollouts) == live.causes.total == 4
    lost = next(row for row in live.causes.rollouts if row["cause"] == "unresolved_parent")
    assert lost["near_item"] == 0 and "history" not in lost["where"] and lost["call_id"][:8] in lost["where"]
    said = [row["meaning"] for row in live.causes.failures]
    assert said and all(escape(words) in table.html() for words in said), "live and snapshot explain a call differently"
    live.causes.chosen = lost["rollout_id"]
    words, _ = unpack(live.rollout.chain.block)
    assert lost["call_id"] in words["ids"] and live.rollout.chain.custody["state"] == "rejected"


def test_choosing_one_of_the_worst_tokens_shows_it_in_its_text(run):
    delta = LogprobDelta(run)
    live = delta.live
    worst = live.delta.worst[0]
    assert abs(worst["delta"]) == pytest.approx(delta.numbers.max_abs)
    assert sum(live.delta.parts[0]["counts"]) == delta.numbers.tokens
    assert [part["name"] for part in live.delta.parts] == ["all", "v0", "v1"]
    live.delta.chosen = 0
    assert live.tokens.at == worst["position"]
    token = run.tokens(worst["rollout_id"]).row(worst["position"], named=True)
    assert token["token_id"] == worst["token_id"] and token["delta"] == pytest.approx(worst["delta"])


def test_views_made_of_frames_say_that_they_hold_no_rows(run):
    live = LogprobDelta(run.logprobs()).live
    live.delta.chosen = 0
    assert "made from a frame of log-probs" in live.tokens.missing
    chain = PrefixChain(run.calls.filter(rollout_id="stored.0.1.0")).live
    chain.chain.selected = unpack(chain.chain.block)[0]["ids"][0]
    assert "made from a frame of calls" in chain.tokens.missing


def test_a_choice_that_is_taken_back_opens_nothing(run):
    delta, causes, chain = LogprobDelta(run).live, PoisonTable(run).live, PrefixChain(run, "stored.0.1.0").live
    for view, chosen, nothing in ((delta.delta, 0, -1), (causes.causes, "stored.1.1.0", "")):
        view.chosen = chosen
        view.chosen = nothing
    chain.chain.selected = unpack(chain.chain.block)[0]["ids"][0]
    opened = chain.tokens.block
    chain.chain.selected = ""
    assert opened and chain.tokens.block == opened
    assert repr(delta) == repr(delta.delta) and repr(causes) == repr(causes.causes)


def test_what_can_no_longer_be_read_is_said_where_it_was_chosen(tmp_path, monkeypatch):
    run = runs.open(make_run(tmp_path / "stored"))
    delta, causes = LogprobDelta(run).live, PoisonTable(run).live
    for table in ("rows", "calls", "ledger"):
        shutil.rmtree(run.path / table)
    delta.delta.chosen = 0
    assert "has no rollout" in delta.tokens.missing
    said: list[dict] = []
    monkeypatch.setattr(type(causes.causes), "send", lambda self, content, buffers=None: said.append(content))
    causes.causes.chosen = causes.causes.rollouts[0]["rollout_id"]
    assert "No calls of rollout" in said[0]["note"]


def test_every_live_view_of_a_ledger_says_what_it_lacks():
    ledger = runs.open_ledger(FOREIGN)
    assert LogprobDelta(ledger).live.delta.missing == "a ledger holds no tokens and no log-probs"
    table = PoisonTable(ledger)
    assert table.snapshot().png and table.live.causes.total == 12
    table.live.causes.chosen = table.rejected["rollout_id"][0]
    assert table.live.rollout.chain.block


def test_a_foreign_ledger_has_live_chains_and_says_that_it_has_no_tokens():
    ledger = runs.open_ledger(FOREIGN)
    for rollout_id in ledger.rollouts["rollout_id"]:
        chain = PrefixChain(ledger, rollout_id)
        words, _ = unpack(chain.live.chain.block)
        assert len(words["ids"]) == chain.calls.height
        assert chain.custody.state in ("open", "rejected")
    chain.live.chain.selected = words["ids"][0]
    assert "custody only" in chain.live.tokens.missing


def test_custody_is_said_with_cause_call_position_and_digest(run):
    verified = PrefixChain(run, "stored.0.1.0")
    terminal = verified.calls.filter("terminal")["cumulative_hash"][0]
    assert verified.custody.sentence() == f"verified, terminal by declared, trained in step 1 · digest {terminal[:8]}"
    lost = run.rollouts.filter(pl.col("detail") == "nonfinite_logprob").row(0, named=True)
    custody = TokenStrip(run, lost["rollout_id"]).custody
    said = f"rejected, worker_capture_failed at call {lost['call_id'][:8]}: nonfinite_logprob (a sampled token"
    assert custody.words.startswith(said)
    placed = custody_of({**lost, "position": 1_203}, None)
    assert f"at call {lost['call_id'][:8]}, token 1,203: " in placed.sentence()


def test_a_rollout_in_flight_has_a_chain_and_says_that_its_tokens_are_not_stored_yet(tmp_path):
    playing = StoredRun(tmp_path / "flying")
    try:
        playing.play("flying.0.0.0", 3, kind="retry")
        chain = PrefixChain(runs.open(playing.run_dir), "flying.0.0.0")
        assert chain.custody.words == "not finalised yet: nothing is verified"
        live = chain.live
        words, _ = unpack(live.chain.block)
        assert len(words["ids"]) == 4 and "1 retry" in repr(chain)
        live.chain.selected = words["ids"][0]
        assert live.tokens.block == b"" and "flying.0.0.0 of run flying is not finalised yet" in live.tokens.missing
    finally:
        playing.writer.close()


def test_route_coverage_is_read_from_the_header_of_what_was_staged(run):
    call_ids = [call for call in run.tokens("stored.0.1.0")["model_call_id"].unique(maintain_order=True)]
    tokens = run.tokens("stored.0.1.0")
    sizes = {
        row["model_call_id"]: (row["carry_tokens"], row["sampled_tokens"])
        for row in run.calls.filter(pl.col("rollout_id") == "stored.0.1.0").iter_rows(named=True)
    }
    full, tail = sum(sizes[call_ids[0]]), sizes[call_ids[1]][1]
    staged = {call_ids[0]: full, call_ids[1]: tail}

    class Routed:
        calls = run.calls.with_columns(
            pl.Series(
                "extras",
                [
                    f'{{"routed_experts":"nrlre1:int8:{staged[call]}x4x2:AAAA"}}' if call in staged else "{}"
                    for call in run.calls["model_call_id"]
                ],
            )
        )

    first, second = full, full + sum(sizes[call_ids[1]])
    assert route_spans(Routed(), "stored.0.1.0", tokens) == [
        [0, "full"],
        [first, "sentinel"],
        [second - tail, "tail"],
        [second, "sentinel"],
    ]
    assert "no routed experts were recorded" in route_spans(run, "stored.0.1.0", tokens)
    assert "made from a run" in route_spans(tokens, "stored.0.1.0", tokens)


def test_modules_are_whole_and_their_names_do_not_collide():
    for entry in ("strip.js", "chain.js", "diff.js", "delta.js", "poison.js", "board.js"):
        text = module(entry)
        assert "import " not in re.sub(r"//.*", "", text) and text.count("export default") == 1
        names = re.findall(r"^(?:async )?(?:function|class|const|let) ([A-Za-z_]\w*)", text, re.MULTILINE)
        assert sorted(names) == sorted(set(names)), entry
        assert not re.search(r"https?://(?!www\.w3\.org)|innerHTML|eval\(|new Function", text)


def test_only_the_mode_is_imported_before_an_inspector_is_used():
    heavy = ("matplotlib", "anywidget", "polars")
    code = f"import sys, workbench.inspect as i; i.set_mode('static'); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_module_of_the_live_views_ships_with_the_package():
    assert {path.suffix for path in JS.iterdir()} == {".js", ".css"}
