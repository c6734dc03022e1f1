"""Inspectors: deterministic, static, bounded, and true to the frames they are given.

Long because each promise is held by all views on the same runs.
"""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import polars as pl
import pytest
from matplotlib.text import Text
from PIL import Image
from stored_run import StoredRun, make_run, rewrite_json_line

from workbench import runs
from workbench.campaign.report.html_export import export_html
from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.summary import summarise
from workbench.demo import recorded_run
from workbench.errors import RunStoreError
from workbench.inspect import (
    CampaignBoard,
    CaptureRate,
    Engagement,
    LogprobDelta,
    Optimisation,
    PoisonTable,
    PrefixChain,
    RewardCurve,
    RouterAgreement,
    RowDiff,
    SweepView,
    TokenStrip,
    look,
    siblings,
    telling_rollout,
    trained_group,
    verified_rollout,
)
from workbench.inspect import html as markup
from workbench.inspect.live.pack import unpack
from workbench.inspect.logprobs import delta_numbers
from workbench.inspect.strip_columns import call_starts
from workbench.inspect.text import pieces_of
from workbench.places import shipped

FOREIGN = Path(__file__).parents[1] / "conformance" / "foreign_ledger" / "ledger"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> runs.Run:
    return runs.open(make_run(tmp_path_factory.mktemp("inspect") / "stored"))


def views(run: runs.Run) -> list:
    rollout_id = telling_rollout(run)
    return [
        PrefixChain(run, rollout_id),
        TokenStrip(run, rollout_id),
        PoisonTable(run),
        LogprobDelta(run),
        CaptureRate(run),
        RewardCurve(run),
        Optimisation(run),
    ]


def test_a_view_is_the_same_text_and_the_same_pixels_every_time(run):
    for one, other in zip(views(run), views(runs.open(run.path)), strict=True):
        assert repr(one) == repr(other) and "0x" not in repr(one) and "\n" not in repr(one)
        assert one.snapshot() == other.snapshot()


def test_a_view_has_picture_and_text_without_script_or_network(run):
    for view in views(run):
        data, metadata = view._repr_mimebundle_()
        assert set(data) == {"image/png", "text/html", "text/plain"}
        assert data["text/plain"] == repr(view)
        assert not re.search(r"<script|<link|<img|http|class=|on\w+=", data["text/html"]), view
        image = Image.open(BytesIO(data["image/png"]))
        assert image.width > 1_000 and metadata["image/png"]["width"] < 1_000
        assert len(data["image/png"]) < 300_000 and len(data["text/html"]) < 100_000


def outside(figure) -> list[str]:
    """The words of titles and axes that reach over the picture's edge or into a neighbour's title."""
    figure.canvas.draw()
    renderer, edge = figure.canvas.get_renderer(), figure.bbox.width
    words = [text for ax in figure.axes for text in (ax._left_title, ax.title, ax.xaxis.label) if text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in words]
    beside = {one for one, a in boxes for other, b in boxes if one != other and a.overlaps(b)}
    return [text for text, box in boxes if box.x0 < 0 or box.x1 > edge or text in beside]


NARROW_PX = 440
"""What a window of 480 px leaves for a picture, in a report and in a notebook."""


def unreadable(figure) -> list[str]:
    """Words that are smaller than nine pixels, or cut, where the picture is scaled to a narrow page."""
    figure.canvas.draw()
    renderer, (width, height) = figure.canvas.get_renderer(), figure.bbox.size
    ticks = [(tick, axis) for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for tick in axis.get_major_ticks()]
    beyond = [
        tick.label1
        for tick, axis in ticks
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    ]
    words = [
        text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible() and text not in beyond
    ]
    boxes = [(text, text.get_window_extent(renderer)) for text in words]
    small = [text for text in words if text.get_size() / 72 * NARROW_PX / figure.get_figwidth() < 8.9]
    cut = [text for text, at in boxes if at.x0 < -1 or at.y0 < -1 or at.x1 > width + 1 or at.y1 > height + 1]
    return [text.get_text() for text in small + cut]


def test_on_a_dark_page_a_picture_is_a_card_and_a_text_has_the_pages_colours(run):
    shown = [PrefixChain(run, "stored.0.1.0"), TokenStrip(run, "stored.0.1.0"), RowDiff(run, run), PoisonTable(run)]
    for view in [*shown, LogprobDelta(run), CampaignBoard(run), CaptureRate(run), RewardCurve(run), Optimisation(run)]:
        image = Image.open(BytesIO(view.snapshot().png)).convert("RGBA")
        right, bottom = image.width - 1, image.height - 1
        for corner in ((0, 0), (right, 0), (0, bottom), (right, bottom)):
            assert image.getpixel(corner)[3] == 0
        assert image.getpixel((12, image.height // 2)) == (255, 255, 255, 255)
        # What is drawn stays off the edge: the paper is all that is there.
        assert len({image.getpixel((x, 6)) for x in range(30, right - 30)}) == 1
        html = view.snapshot().html
        assert "background:#" not in html and not re.search(r"[;\"](color|border)[^;\"]*#", html)


def test_every_word_of_a_picture_can_be_read_on_a_narrow_page(run, tmp_path):
    shutil.copytree(recorded_run(), tmp_path / "one")
    shutil.copytree(recorded_run(), tmp_path / "other")
    recorded = runs.open(recorded_run())
    chains = [PrefixChain(recorded, rollout_id) for rollout_id in recorded.rollouts["rollout_id"]]
    others = [RowDiff(run, run), CampaignBoard(run), SweepView(tmp_path), *chains]
    for view in (*views(run), *views(recorded), *others):
        assert unreadable(view.figure()) == [], view


def test_titles_of_many_causes_and_many_versions_stay_in_the_picture(run):
    causes = [f"cause_with_a_long_name_number_{number}" for number in range(54)]
    rows = run.rollouts.head(1).drop("cause").join(pl.DataFrame({"cause": causes}), how="cross")
    many = SimpleNamespace(rollouts=rows.with_columns(step=pl.lit(1, pl.Int64)), calls=run.calls)
    assert "12 of 54 causes" in PoisonTable(many).figure().axes[0].get_xlabel()
    delta = LogprobDelta(run.logprobs().with_columns(weight_version=pl.int_range(pl.len()) % 9))
    assert delta.figure().axes[1].get_title("left") == "mean |Δ| by place; 5 of 9 weight versions"
    assert "v: weight version" in delta.figure().axes[1].get_xlabel()
    for view in (PoisonTable(many), delta, PoisonTable(run), LogprobDelta(run)):
        assert outside(view.figure()) == []


def test_the_token_in_rate_of_every_headline_is_the_whole_runs():
    recorded = runs.open(recorded_run())
    token_in, roots = ((recorded.calls["mode"] == mode).sum() for mode in ("token_in", "text"))
    whole = f"{token_in / (recorded.calls.height - roots):.4g}"
    assert f"token_in_rate_after_roots {whole} of the whole run" in repr(CaptureRate(recorded))
    assert f"after roots {whole}" in repr(Engagement(recorded))
    assert f"token_in_rate after roots {whole}" in repr(CampaignBoard(recorded))
    assert float(whole) not in recorded.steps["token_in_rate_after_roots"].round(4).to_list()


def test_a_picture_in_an_exported_page_has_the_sentence_for_who_does_not_see_it(run, tmp_path):
    (picture, metadata), _ = CaptureRate(run).snapshot().outputs()
    shown = nbformat.v4.new_output("display_data", _as_text(picture), metadata=metadata)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[shown])])
    export_html(notebook, tmp_path / "page.html", "page")
    assert f'alt="{CaptureRate(run)}"' in (tmp_path / "page.html").read_text()


def _as_text(data: dict) -> dict:
    return {**data, "image/png": b64encode(data["image/png"]).decode()}


def test_a_view_shows_picture_and_text_as_two_outputs(run, monkeypatch):
    published = []
    monkeypatch.setattr("IPython.display.publish_display_data", lambda data, metadata=None: published.append(data))
    CaptureRate(run)._ipython_display_()
    kinds = [set(data) for data in published]
    assert kinds == [{"image/png", "text/plain"}, {"text/html", "text/plain"}]


def test_the_chain_says_what_is_on_it_and_what_is_beside(run):
    chain = PrefixChain(run, "stored.0.1.0")
    row = run.rollouts.filter(pl.col("rollout_id") == "stored.0.1.0").row(0, named=True)
    assert repr(chain) == (
        f"Rollout stored.0.1.0 · 4 calls · 1 retry · {row['tokens']} tokens ({row['sampled_tokens']} sampled) · "
        f"reward {row['reward']:g} · verified, trained in step 1"
    )
    html = chain.html()
    for call in run.calls.filter(pl.col("rollout_id") == "stored.0.1.0").iter_rows(named=True):
        assert call["model_call_id"][:8] in html and call["digest"][:8] in html
    assert "retry: the same request again" in html and html.count("on the trained chain") == 3


def test_a_rejected_rollout_shows_cause_and_the_call_that_is_near(run):
    chain = PrefixChain(run, "stored.1.1.0")
    assert repr(chain).endswith("rejected: unresolved_parent")
    assert "history_edited" in chain.html() and "unresolved" in chain.to_text()


def test_a_long_chain_is_bounded_and_says_so():
    rows = [
        {
            "rollout_id": "r",
            "model_call_id": f"{i:032x}",
            "order": i + 1,
            "mode": "token_in" if i else "text",
            "parent_call_id": f"{i - 1:032x}" if i else None,
            "delta_len": 10,
            "cum_len": 10 * (i + 1),
            "sampled_tokens": 4,
            "weight_version": 0,
            "finish_reason": "stop",
            "digest": "ab" * 32,
            "relation": "chain",
            "failure_reason": None,
            "detail": None,
        }
        for i in range(1_204)
    ]
    chain = PrefixChain(pl.DataFrame(rows, infer_schema_length=None))
    data, _ = chain._repr_mimebundle_()
    assert len(chain.places) == 1_204
    assert "Showing 45 of 1,204 calls drawn and 200 listed" in data["text/html"]
    assert sum(len(value) for value in data.values()) < 1_000_000


def test_a_foreign_ledgers_chain_is_drawn_without_tokens():
    ledger = runs.open_ledger(FOREIGN)
    for rollout_id in ledger.rollouts["rollout_id"].to_list()[:8]:
        shot = PrefixChain(ledger, rollout_id).snapshot()
        assert shot.png is not None and rollout_id in shot.text


def test_token_strip_shows_special_tokens_whole_characters_and_what_was_sampled(run):
    strip = TokenStrip(run, "stored.0.1.0")
    html = strip.html()
    assert "&lt;|im_start|&gt;" in html and "🎲" in html and "\ufffd" not in html
    tokens = run.tokens("stored.0.1.0")
    assert html.count("<u ") == int(tokens["sampled"].sum())
    assert "mean |Δ|" in repr(strip)


def test_token_strip_is_bounded_and_says_so(run):
    tokens = run.tokens("stored.0.1.0")
    many = pl.concat([tokens] * 700).with_columns(pl.int_range(pl.len()).alias("position"))
    strip = TokenStrip(many, vocabulary=run.vocabulary())
    data, _ = strip._repr_mimebundle_()
    assert many.height > 100_000
    assert f"Showing tokens 0 to 1,500 of {many.height:,}" in data["text/html"]
    assert sum(len(value) for value in data.values()) < 1_000_000


def test_token_strip_without_a_vocabulary_shows_ids(run):
    html = TokenStrip(run.tokens("stored.0.1.0")).html()
    assert "No vocabulary at hand" in html and "256 " in html


def test_a_run_without_a_vocabulary_says_where_one_was_looked_for(tmp_path):
    path = make_run(tmp_path / "mute", steps=1)
    (path / "vocabulary.json").unlink()
    mute = runs.open(path)
    strip = TokenStrip(mute, telling_rollout(mute))
    assert "ids are shown, not text." in strip.html() and "neither vocabulary.json nor" in strip.html()
    words, _ = unpack(strip.live.block)
    assert dict((key, why) for key, _, why in words["signals"])["role"] == "no vocabulary is at hand"


def test_causes_add_up_to_the_rejected_rollouts(run):
    table = PoisonTable(run)
    assert int(table.causes["rollouts"].sum()) == run.rollouts["cause"].is_not_null().sum() == 4
    html = table.html()
    assert "unresolved_parent" in html and "nonfinite_logprob" in html and "history_edited" in html


def test_rollouts_of_one_cause_that_failed_for_different_reasons_are_said_to(run):
    told = {"stored.0.0.0": "raised A at mine.py:3", "stored.0.1.0": "raised B at mine.py:9"}
    failed = pl.col("rollout_id").is_in(list(told))
    rollouts = run.rollouts.with_columns(
        cause=pl.when(failed).then(pl.lit("rollout_failed")),
        detail=pl.when(failed).then(pl.col("rollout_id").replace(told)),
    )
    html = PoisonTable(SimpleNamespace(rollouts=rollouts, calls=run.calls)).html()
    assert "raised A at mine.py:3" in html and "and 1 other detail, below" in html
    assert "<details>" in html and "rollout_failed: 2 details of 2 rollouts" in html and "raised B at mine.py:9" in html
    one = rollouts.filter(pl.col("rollout_id") != "stored.0.1.0")
    html = PoisonTable(SimpleNamespace(rollouts=one, calls=run.calls)).html()
    assert "other detail" not in html and "<details>" not in html


def test_details_of_a_cause_are_counted_and_bounded(run):
    rows = run.rollouts.head(1).drop("cause", "detail").join(
        pl.DataFrame({"detail": ["lost the sandbox"] * 21 + [f"line {n}" for n in range(30)] + [None]}), how="cross"
    )  # fmt: skip
    many = PoisonTable(SimpleNamespace(rollouts=rows.with_columns(cause=pl.lit("rollout_failed")), calls=run.calls))
    html = many.html()
    assert "rollout_failed: 32 details of 52 rollouts" in html and ">21<" in html and "line 18" in html
    assert "line 19" not in html and "Showing 20 of 32; the others are of 12 rollouts" in html
    assert many.details["rollouts"].sum() == many.total == 52


def test_numbers_of_a_difference_are_upstreams_formulas():
    d = np.array([0.1, -0.2, 0.0, 0.05])
    numbers = delta_numbers(d)
    assert numbers.token_mult_prob_error == pytest.approx(np.mean(np.exp(np.abs(d))))
    assert numbers.gen_kl_error == pytest.approx(np.mean(np.exp(d) - d - 1))
    assert numbers.mean_abs == pytest.approx(0.0875) and numbers.max_abs == pytest.approx(0.2)


def test_the_difference_at_equal_weights_stands_beside_the_one_over_all_tokens(run):
    recorded = runs.open(recorded_run())
    tokens = recorded.logprobs().drop_nulls("delta")
    equal = tokens.filter(pl.col("weight_version") == pl.col("step") - 1)["delta"].abs()
    assert 0 < equal.len() < tokens.height
    shown = LogprobDelta(recorded)
    assert f"mean |Δ| {tokens['delta'].abs().mean():.4f} ({equal.mean():.4f} at equal weights)" in repr(shown)
    assert ">equal weights<" in shown.html() and f">{equal.mean():.5f}<" in shown.html()
    assert [part["name"] for part in shown.live.children[0].parts][:2] == ["all", "equal weights"]
    stale = LogprobDelta(tokens.filter(pl.col("weight_version") < pl.col("step") - 1))
    assert "(none at equal weights)" in repr(stale) and "No token is at equal weights" in stale.html()
    fresh = LogprobDelta(tokens.filter(pl.col("weight_version") == pl.col("step") - 1))
    assert "(all at equal weights)" in repr(fresh) and ">equal weights<" not in fresh.html()


def test_tokens_of_an_earlier_version_are_not_said_to_differ_by_steps_that_changed_no_weight():
    tokens = runs.open(recorded_run()).logprobs().drop_nulls("delta")
    steps = pl.DataFrame({"step": [1, 2, 3, 4], "grad_norm": [0.0] * 4, "optimizer_stepped": [1] * 4})

    def said(weight_decay: float | None, norms: list[float]) -> str:
        train = {} if weight_decay is None else {"weight_decay": weight_decay}
        now = steps.with_columns(grad_norm=pl.Series(norms))
        return LogprobDelta(SimpleNamespace(logprobs=lambda: tokens, steps=now, recipe={"train": train})).html()

    same, other = "no step in between changed a weight", "can differ by the optimiser steps in between as well"
    still = said(0.0, [0.0] * 4)
    assert same in still and other not in still
    assert "(all at equal weights)" in still and "All tokens are at equal weights" in still
    for weight_decay, norms in ((0.5, [0.0] * 4), (None, [0.0] * 4), (0.0, [0.3, 0.0, 0.0, 0.0])):
        assert other in said(weight_decay, norms) and same not in said(weight_decay, norms)
    assert other in LogprobDelta(tokens).html()


def test_equal_weights_are_the_same_tokens_in_the_view_and_in_the_summary(tmp_path):
    """Two steps without a gradient, then two that move the weights: of tokens a version old those of step 2 alone."""
    stored = StoredRun(tmp_path / "run")
    recipe = stored.run_dir / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("train: {", "train: {weight_decay: 0.0, "))
    made = [stored.group(step, step - 1, ["plain", "plain"]) for step in (1, 2)]
    for step, group in enumerate(made, start=1):
        stored.take(step, [group])
    for step in (3, 4):
        stored.take(step, [stored.group(step, step - 1, ["plain", "plain"])])
    run_dir = stored.finish()
    for line, norm in enumerate((0.0, 0.0, 0.4, 0.4)):
        rewrite_json_line(run_dir / "steps.jsonl", line, {"grad_norm": norm})
    tokens = runs.open(run_dir).logprobs().drop_nulls("delta")
    spans = tokens.select("weight_version", "step").unique(maintain_order=True).rows()
    assert spans == [(0, 1), (0, 2), (2, 3), (3, 4)]
    view = LogprobDelta(runs.open(run_dir))
    summary = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert view.equal.height == summary.on_policy_tokens == tokens.height
    rewrite_json_line(run_dir / "steps.jsonl", 0, {"grad_norm": 0.4})
    view = LogprobDelta(runs.open(run_dir))
    summary = summarise(run_dir, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=3.0)
    assert view.equal.height == summary.on_policy_tokens == tokens.filter(pl.col("step") != 2).height
    assert summary.mean_abs_logprob_delta_on_policy == pytest.approx(view.equal["delta"].abs().mean())


def test_tokens_of_a_step_without_a_line_are_said_to_be_in_no_view_by_step(tmp_path):
    run_dir = make_run(tmp_path / "cut")
    assert "no line" not in LogprobDelta(runs.open(run_dir)).html()
    lines = (run_dir / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "steps.jsonl").write_bytes(lines[0])
    run = runs.open(run_dir)
    count = run.logprobs().filter(step=2).height
    assert f"Of all tokens {count} are of step 2, of which steps.jsonl has no line" in LogprobDelta(run).html()


def test_a_step_in_which_no_rollout_was_rejected_has_no_edge_of_a_placeholder(tmp_path):
    stored = StoredRun(tmp_path / "run")
    stored.step(1, [["plain", "plain"]])
    stored.step(2, [["plain", "edit"]])
    _, rows = CaptureRate(runs.open(stored.finish())).figure().axes
    assert [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in rows.patches] == [
        pytest.approx(at) for at in ((1, 2), (2, 1), (2, 1))
    ]
    whole = StoredRun(tmp_path / "whole")
    whole.step(1, [["plain", "plain"]])
    _, rows = CaptureRate(runs.open(whole.finish())).figure().axes
    assert rows.get_legend_handles_labels()[1] == ["valid row"]


def test_a_step_without_a_valid_reward_is_not_called_the_last_that_has_one(run):
    def said(*rewards: tuple[int, float]) -> str:
        base = {"sample_mask": 1, "group_id": "g", "index": 0, "trained_step": 1}
        rows = [base | {"taken_step": step, "reward": reward} for step, reward in rewards]
        steps = pl.DataFrame({"step": [1, 2, 3], "reward_mean": [dict(rewards).get(step) for step in (1, 2, 3)]})
        return repr(RewardCurve(SimpleNamespace(rollouts=pl.DataFrame(rows), steps=steps)))

    assert said((1, 0.5), (2, 0.25)) == (
        "Reward over 2 of 3 steps · mean 0.500 at the first, 0.250 in step 2 · no valid reward in step 3 · "
        "2 valid rollouts"
    )
    assert "mean 0.500 in step 2, 0.250 at the last · no valid reward in step 1" in said((2, 0.5), (3, 0.25))
    assert "over 1 of 3 steps · mean 0.500 in step 2 · no valid reward in steps 1, 3" in said((2, 0.5))
    assert "over 3 steps · mean 0.500 at the first, 0.125 at the last · 3" in said((1, 0.5), (2, 0.25), (3, 0.125))


def test_the_bars_of_a_mean_are_not_parted_in_a_narrow_tables_head(run):
    html = LogprobDelta(run).html()
    assert re.search(r"<th [^>]*white-space:nowrap[^>]*>mean \|Δ\|</th>", html)
    assert len(re.findall("<th [^>]*white-space:nowrap", html)) == 1, "longer heads may break"
    assert 'mean <span style="white-space:nowrap">|Δ|</span>' in html, "nor in the sentence over it"


def test_no_worst_token_is_an_empty_cell():
    texts = [row["text"] for row in LogprobDelta(runs.open(recorded_run())).worst(10_000)]
    assert '" "' in texts and all(text.strip() for text in texts)


def test_the_text_before_a_worst_token_is_that_of_its_row_and_not_of_the_sampled_tokens_alone(run):
    delta = LogprobDelta(run)
    rows = delta.worst(60)
    firsts = 0
    for row in rows:
        tokens = run.tokens(row["rollout_id"])
        before = tokens.slice(max(0, row["position"] - 8), min(8, row["position"]))
        firsts += not before["sampled"].all()
        assert row["before"] == "".join(p.shown for p in pieces_of(before["token_id"].to_list(), run.vocabulary()))
    assert firsts, "no token close behind a carried one was among them"
    for row in LogprobDelta(run.logprobs(), vocabulary=run.vocabulary()).worst(60):
        known = run.tokens(row["rollout_id"])["sampled"].to_list()[: row["position"]]
        contiguous = min(8, len(known) if all(known) else known[::-1].index(False))
        ids = run.tokens(row["rollout_id"])["token_id"].to_list()[row["position"] - contiguous : row["position"]]
        assert row["before"] == "".join(p.shown for p in pieces_of(ids, run.vocabulary()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logprob_that_is_no_number_is_named_and_spoils_no_other(run, bad):
    frame = run.logprobs()
    at = pl.int_range(pl.len()) == 3
    wrong = frame.with_columns(
        *(pl.when(at).then(bad).otherwise(pl.col(n)).cast(pl.Float32).alias(n) for n in ("trainer_logprob", "delta"))
    )
    delta = LogprobDelta(wrong, vocabulary=run.vocabulary())
    rest = LogprobDelta(frame.filter(pl.arange(pl.len()) != 3), vocabulary=run.vocabulary())
    assert delta.numbers == rest.numbers and repr(delta) == f"{rest!r} · 1 more NOT FINITE"
    assert delta.worst(1)[0]["position"] == frame["position"][3] and delta.snapshot().png
    state = delta.live.delta
    json.dumps([state.parts, state.edges, state.worst, state.findings], allow_nan=False)
    nothing = LogprobDelta(frame.with_columns(delta=pl.lit(bad, dtype=pl.Float32)))
    assert "none of" in repr(nothing) and "finite log-prob" in repr(nothing) and nothing.snapshot().png
    tokens = run.tokens("stored.0.1.0").with_columns(
        pl.when(pl.col("delta").is_not_null()).then(bad).cast(pl.Float32).alias("delta")
    )
    assert repr(TokenStrip(tokens)).endswith(f" · {tokens['delta'].count()} Δ NOT FINITE")
    assert TokenStrip(tokens).snapshot().png


def test_a_view_of_several_rollouts_asks_for_one(run):
    with pytest.raises(RunStoreError, match=r"Expected calls of one rollout, got 16; name one"):
        PrefixChain(run.calls)
    with pytest.raises(RunStoreError, match=r"Expected a rollout id beside the run: TokenStrip\(run, rollout_id\)"):
        TokenStrip(run)


def test_a_row_without_tokens_calls_or_turns_is_still_a_view(run):
    tokens = run.tokens("stored.0.1.0")
    assert repr(TokenStrip(tokens.head(0)).live) == "Tokens of None · 0 tokens (0 sampled) · 0 calls"
    nameless = TokenStrip(tokens.with_columns(model_call_id=pl.lit(None, pl.String)))
    assert [name for _, _, name, *_ in call_starts(nameless.tokens, {})] == ["?"]
    assert nameless.live.missing == "" and nameless.html()


def test_numbers_that_nobody_recorded_are_a_dash_and_not_zero(tmp_path):
    stored = StoredRun(tmp_path / "bare")
    stored.writer.step({"step": 1, "weight_version": 1})
    assert ">–<" in CaptureRate(runs.open(stored.run_dir)).html()
    stored.writer.close()


def test_log_probs_of_a_run_without_a_vocabulary_are_shown_by_id(tmp_path):
    run_dir = make_run(tmp_path / "stored", steps=1)
    (run_dir / "vocabulary.json").unlink()
    view = LogprobDelta(runs.open(run_dir))
    assert view.vocabulary is None and view.snapshot().png


def test_calls_of_which_nothing_is_known_but_their_place_are_drawn(run):
    calls = run.calls.filter(rollout_id="stored.0.1.0").with_columns(
        delta_len=pl.lit(None, pl.Int64), sampled_tokens=pl.lit(None, pl.Int64)
    )
    chain = PrefixChain(calls)
    assert "no tokens recorded" in str([text.get_text() for ax in chain.draw().axes for text in ax.texts])


def test_a_long_chain_is_cut_in_text_too(run):
    text = PrefixChain(run, "stored.0.2.0", max_rows=2).to_text()
    assert text.endswith("showing 2 of 5 calls")


def test_the_first_verified_rollout_stands_in_for_a_telling_one_that_was_rejected(tmp_path):
    stored = StoredRun(tmp_path / "few")
    stored.step(1, [["plain", "nan"]])
    run = runs.open(stored.finish())
    telling = run.rollouts.filter(~pl.col("verified"))["rollout_id"].item()
    assert verified_rollout(run, None) != telling
    only = run.rollouts.filter("verified")["rollout_id"].item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.inspect.choose.telling_rollout", lambda run: telling)
        assert verified_rollout(run) == only


def test_what_is_too_much_for_a_table_is_counted(tmp_path):
    stored = StoredRun(tmp_path / "many")
    stored.step(1, [["plain", *["edit"] * 45]])
    table = PoisonTable(runs.open(stored.finish()))
    assert re.search(r"Showing \d+ of 45; all: \.drift", table.html())


def test_a_view_made_of_the_wrong_thing_says_what_it_expected(run):
    for view in (PrefixChain, TokenStrip):
        with pytest.raises(RunStoreError, match=r"expected a run or a frame, got .*open_any\('a/run'\)"):
            view("a/run", "stored.0.1.0")
    with pytest.raises(RunStoreError, match=r"Expected a token frame, .* it has no token_id, sampled, logprob"):
        TokenStrip(run.calls, "stored.0.1.0")
    for make in (
        CampaignBoard, CaptureRate, Engagement, LogprobDelta, Optimisation, PoisonTable, RewardCurve, RouterAgreement,
        telling_rollout, verified_rollout, siblings, trained_group, lambda name: RowDiff(run, name),
    ):  # fmt: skip
        with pytest.raises(RunStoreError, match=r"expected a run.*, got str; open a run: .*open_any\('a/run'\)"):
            make("a/run")
    with pytest.raises(RunStoreError, match="CaptureRate expected a run, got ForeignLedger, which has no steps"):
        CaptureRate(runs.open_ledger(FOREIGN))
    two = pl.concat([run.tokens("stored.0.1.0"), run.tokens("stored.0.0.0")])
    with pytest.raises(RunStoreError, match=r"tokens of one rollout, got 2; name one"):
        TokenStrip(two)
    with pytest.raises(RunStoreError, match=r"no tokens of rollout 'nobody'; it holds: stored.0.1.0, stored.0.0.0"):
        TokenStrip(two, "nobody")
    assert TokenStrip(two, "stored.0.0.0").tokens.equals(run.tokens("stored.0.0.0"))
    with pytest.raises(RunStoreError, match="Expected two rollout ids"):
        RowDiff(run, run, rollouts=("stored.0.1.0",))


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_a_shift_by_whole_tokens_is_found(run, shift):
    frame = run.logprobs()
    moved = [
        part.with_columns(pl.Series("trainer_logprob", np.roll(part["logprob"].to_numpy(), shift)))
        for _, part in frame.group_by("step", "rollout_id", maintain_order=True)
    ]
    assert LogprobDelta(pl.concat(moved)).shift == shift


def test_a_shifted_run_says_so(run):
    frame = run.logprobs()
    moved = frame.with_columns(pl.col("logprob").shift(1, fill_value=-1.0).over("rollout_id").alias("trainer_logprob"))
    moved = moved.with_columns((pl.col("trainer_logprob") - pl.col("logprob")).alias("delta"))
    assert "SHIFTED BY +1" in repr(LogprobDelta(moved, vocabulary=run.vocabulary()))


def test_an_empty_run_has_pictures_that_say_why_they_are_empty(tmp_path):
    stored = StoredRun(tmp_path / "empty")  # whose writer is at work as long as it is held
    run = runs.open(stored.run_dir)
    for view, words in (
        (CaptureRate(run), "no optimiser step yet"),
        (RewardCurve(run), "no valid rollout yet"),
        (PoisonTable(run), "no rollout has been finalised yet"),
        (LogprobDelta(run), "no token has been trained on yet"),
    ):
        assert words in repr(view) and view.snapshot().png
    assert telling_rollout(run) is None
    for view in (PrefixChain, TokenStrip):
        shown = look(view, run, None)
        assert not shown and "has no calls yet" in repr(shown) and shown.snapshot().png is None
    stored.writer.close()


def test_nothing_may_still_come_of_a_run_whose_process_is_gone(tmp_path):
    StoredRun(tmp_path / "killed").writer.close()
    run = runs.open(tmp_path / "killed")
    assert run.status["status"] == "running", "its last word"
    for view in (CaptureRate, RewardCurve, PoisonTable, LogprobDelta, Optimisation, Engagement):
        assert " yet" not in view(run).snapshot().text + view(run).html()


def test_a_run_that_trained_nothing_shows_its_rollouts_and_rewards(tmp_path):
    stored = StoredRun(tmp_path / "served")
    stored.group(1, 0, ["plain", "plain", "edit"])
    run_dir = stored.finish()
    rewrite_json_line(run_dir / "groups.jsonl", 0, {"step": None})
    run = runs.open(run_dir)
    assert repr(CaptureRate(run)) == "Capture over steps · no optimiser step · 2 of 3 rollouts valid"
    view = RewardCurve(run)
    rewards = run.rollouts.filter(sample_mask=1)["reward"]
    mean = f"mean {rewards.mean():.3f} of 2 with a reward"
    assert repr(view) == f"Reward · 2 valid rollouts, none trained · {mean}"
    assert all(f"{reward:.3f}" in view.html() for reward in rewards)
    (dots,) = view.draw().axes[0].collections
    assert dots.get_offsets()[:, 1].tolist() == rewards.to_list()


def test_a_served_run_says_that_it_trains_nothing_and_which_calls_are_counted(tmp_path):
    stored = StoredRun(tmp_path / "served")
    stored.group(1, 0, ["plain", "plain"])
    run_dir = stored.finish()
    rewrite_json_line(run_dir / "groups.jsonl", 0, {"step": None})
    for path in (run_dir / "ledger").glob("served.0.0.0.*.jsonl"):
        words = path.read_text().replace("served.0.0.0", "asked-for-none")
        path.with_name(path.name.replace("served.0.0.0", "asked-for-none")).write_text(words)
    with (run_dir / "events.jsonl").open("a") as events:
        events.write('{"kind": "serving"}\n')
    run = runs.open(run_dir)
    assert run.served
    for view in (CaptureRate(run), Optimisation(run), LogprobDelta(run)):
        assert "a served run trains nothing" in repr(view) and len(view.draw().axes) == 1
    assert "<table" not in CaptureRate(run).html()
    rest = run.calls.filter(rollout_id="asked-for-none").height
    said = f"all {run.calls.height} calls, {rest} of 1 rollout without a receipt, which no group has."
    assert 0 < rest < run.calls.height and said in Engagement(run).html()


def test_a_run_that_trained_without_rewards_does_not_say_that_nothing_was_trained():
    frame = pl.DataFrame({"rollout_id": ["r"], "sample_mask": [1], "group_id": ["g"], "index": [0]})
    frame = frame.with_columns(taken_step=pl.lit(1, pl.Int64))
    view = RewardCurve(SimpleNamespace(rollouts=frame.with_columns(reward=pl.lit(None, pl.Float64))))
    assert repr(view) == "Reward over steps · 1 valid rollout, and no reward was given"
    assert view.draw().axes[0].texts[0].get_text() == "1 valid rollout, and no reward was given"


def test_valid_rollouts_without_a_reward_are_no_empty_run():
    frame = pl.DataFrame({"rollout_id": ["my-1"], "sample_mask": [1], "group_id": ["my-1"], "index": [0]})
    frame = frame.with_columns(reward=pl.lit(None, pl.Float64), taken_step=pl.lit(None, pl.Int64))
    view = RewardCurve(SimpleNamespace(rollouts=frame))
    assert repr(view) == "Reward · 1 valid rollout, none trained · no reward given"
    assert view.draw().axes[0].texts[0].get_text() == "1 valid rollout, and no reward was given"


def test_a_rollout_stands_at_the_step_that_took_it_and_not_at_the_one_it_was_sampled_for(tmp_path):
    stored = StoredRun(tmp_path / "fifo")
    first, second, third = (
        stored.group(step, step - 1, kinds)
        for step, kinds in ((1, ["plain", "plain", "edit"]), (2, ["plain", "plain"]), (3, ["plain", "nan"]))
    )
    stored.take(1, [second])
    stored.take(2, [first])
    run = runs.open(stored.finish())
    assert [row["group_id"] for row in run.rollouts.filter(taken_step=1).to_dicts()] == [second.group_id] * 2
    rewards = [group.metrics.rates()["reward_mean"] for group in (second, first)]
    assert RewardCurve(run).steps["mean"].to_list() == pytest.approx(rewards)
    assert RewardCurve(run).steps["mean"].to_list() == run.steps["reward_mean"].to_list()
    assert repr(RewardCurve(run)).endswith(
        f"{rewards[1]:.3f} at the last · 4 valid rollouts, 1 more in no recorded step"
    )
    assert CaptureRate(run).steps.select("step", "rows_seen", "valid").rows() == [(1, 2, 2), (2, 3, 2)]
    causes = PoisonTable(run)
    assert causes.by_step.rows() == [("unresolved_parent", 2, 1)] and third.group_id == "g00002"
    assert causes.draw().axes[0].get_xlabel() == "optimiser step; 1 rejected in none"


def test_a_step_that_was_cut_short_is_no_step_of_any_view(tmp_path):
    stored = StoredRun(tmp_path / "cut")
    stored.group(1, 0, ["plain", "plain"])
    before = runs.open(stored.run_dir)
    assert repr(Optimisation(before)) == "Optimisation · no optimiser step yet"
    assert repr(RewardCurve(before)).startswith("Reward · 2 valid rollouts, none trained · mean ")
    stored.step(1, [["plain", "plain"]])
    (stored.run_dir / "steps.jsonl").write_bytes(b"")
    stored.writer.status({"status": "stopped"})
    stored.writer.close()
    run = runs.open(stored.run_dir)
    assert repr(Optimisation(run)) == "Optimisation · no line of steps.jsonl; 2 rollouts trained in step 1"
    words = "no line of steps.jsonl names any of 2 trained rollouts"
    assert repr(RewardCurve(run)) == f"Reward over steps · {words}" and words in repr(CaptureRate(run))


def test_a_run_that_has_ended_says_nothing_of_yet(tmp_path):
    run = runs.open(StoredRun(tmp_path / "nothing").finish())
    said = ["no optimiser step", "no valid rollout", "no optimiser step", "no rollout has been finalised"]
    views = (CaptureRate(run), RewardCurve(run), Optimisation(run), PoisonTable(run))
    assert [repr(view).partition(" · ")[2] for view in views] == said


def test_a_run_without_rejections_says_so(tmp_path):
    stored = StoredRun(tmp_path / "good")
    stored.step(1, [["plain", "plain"]])
    run = runs.open(stored.finish())
    assert repr(PoisonTable(run)) == "Causes · none of 2 rollouts was rejected"
    assert PoisonTable(run).snapshot().png


def test_the_readers_own_matplotlib_settings_are_left_alone(run):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    RewardCurve(run).snapshot()
    assert dict(mpl.rcParams) == before


def test_an_unknown_rollout_is_answered_with_what_there_is(run):
    with pytest.raises(RunStoreError, match="No calls of rollout 'nobody' here; there are, for instance: stored"):
        PrefixChain(run, "nobody")


def test_what_cannot_be_shown_is_answered_in_a_sentence(run):
    with pytest.raises(RunStoreError, match=r"Expected a rollout id such as .* got 3"):
        PrefixChain(run, 3)
    with pytest.raises(RunStoreError, match="start=99,999 is none of them"):
        TokenStrip(run, "stored.0.1.0", start=99_999)
    for count in (0, -5, 2.5):
        with pytest.raises(RunStoreError, match="max_tokens to be a whole number of at least 1"):
            TokenStrip(run, "stored.0.1.0", max_tokens=count)
    with pytest.raises(RunStoreError, match="PrefixChain expected max_rows"):
        PrefixChain(run, "stored.0.1.0", max_rows=0)
    shown = look(TokenStrip, run, "nobody")
    assert not shown and repr(shown).startswith("Run stored has no rollout 'nobody'")
    assert look(PrefixChain, run, "stored.0.1.0")
    with pytest.raises(RunStoreError, match="no group 'g9'; it has 4: g00000"):
        trained_group(run, "g9")
    with pytest.raises(RunStoreError, match=r"stored.1.1.0 is not verified: it was rejected for unresolved_parent"):
        verified_rollout(run, "stored.1.1.0")


def test_a_call_has_one_number_in_chain_and_strip(run):
    chain, strip = PrefixChain(run, "stored.0.1.0"), TokenStrip(run, "stored.0.1.0")
    words, _ = unpack(strip.live.block)
    shown = {call_id: order for _, call_id, _, _, order in words["calls"]}
    rows = run.calls.filter(rollout_id="stored.0.1.0", relation="chain")
    assert shown == dict(rows.select("model_call_id", "order").rows())
    for call_id, order in shown.items():
        assert f"call #{order} {call_id[:8]}" in strip.html() and f"#{order} {call_id[:8]}" in chain.to_text()


def test_the_tokens_of_a_side_branch_are_not_called_those_of_the_training_row():
    recorded = runs.open(recorded_run())
    beside = recorded.calls.filter(relation="branch").row(0, named=True)
    trained, branch = (TokenStrip(recorded, beside["rollout_id"], call_id=c) for c in (None, beside["model_call_id"]))
    assert trained.custody.state == "verified"
    assert branch.custody.state == "open" and "not in the training row: side branch" in branch.custody.words
    assert branch.custody.digest == beside["cumulative_hash"][:8] != trained.custody.digest


def test_a_rollout_without_calls_says_why_and_is_not_taken_for_a_typing_error():
    recorded = runs.open(recorded_run())
    rejected = recorded.rollouts.filter(recorded.rollouts["cause"].is_not_null()).row(0, named=True)

    class WithoutItsCalls:
        calls = recorded.calls.filter(recorded.calls["rollout_id"] != rejected["rollout_id"])
        rollouts = recorded.rollouts

    reason = f"has no recorded call, so there is no chain: rejected, {rejected['cause']}"
    with pytest.raises(RunStoreError, match=reason):
        PrefixChain(WithoutItsCalls(), rejected["rollout_id"])
    with pytest.raises(RunStoreError, match="No calls of rollout 'nobody' here; there are, for instance"):
        PrefixChain(recorded, "nobody")


def test_the_best_run_at_its_last_step_is_one_that_has_a_step(tmp_path):
    """A served run has rewards and no step, so nothing of it is `at the last step`."""
    for name in ("one", "other", "served"):
        shutil.copytree(recorded_run(), tmp_path / name)
        status = json.loads((tmp_path / name / "status.json").read_text()) | {"run": name}
        (tmp_path / name / "status.json").write_text(json.dumps(status))
    (tmp_path / "served" / "steps.jsonl").write_bytes(b"")
    (tmp_path / "served" / "status.json").write_text(json.dumps(status | {"command": "serve"}))
    view = SweepView(tmp_path)
    rewards = dict(view.table.select("run", "reward").rows())
    assert rewards["served"] > rewards["one"] == rewards["other"]
    assert "highest reward at the last step: 2 of 2 runs alike (" in repr(view)
    shutil.rmtree(tmp_path / "other")
    assert "highest reward" not in repr(SweepView(tmp_path))


def test_the_numbers_of_a_delta_are_explained_under_them_and_a_column_has_one_format(run):
    words = LogprobDelta(run).html()
    for meaning in ("99 of 100 tokens lie below p99", "mean of exp |Δ|", "an estimate of KL(sampler ‖ trainer)"):
        assert meaning in words
    small = LogprobDelta(run.logprobs().with_columns(trainer_logprob=pl.col("logprob") + 3e-6, delta=pl.lit(3e-6)))
    assert ">3.0e-06<" in small.html() and ">0.00000<" not in small.html()


def test_the_head_of_a_column_stands_over_its_numbers_on_their_side():
    page = markup.table(("step", "why"), [[markup.Cell("1", right=True), "because"]])
    sides = re.findall(r"<(t[hd]) style=\"[^\"]*text-align:(\w+)", page)
    assert sides == [("th", "right"), ("th", "left"), ("td", "right"), ("td", "left")]


def test_the_report_names_the_page_that_says_how_to_read_it():
    (notebook,) = shipped("notebooks").glob("10_campaign.ipynb")
    first = "".join(json.loads(notebook.read_text())["cells"][0]["source"])
    (named,) = re.findall(r"`(docs/[^`]+)`", first)
    assert (Path(__file__).parents[2] / named).is_file()
