"""The start-up probe: each thing that it must not let pass, on a scripted engine that lets it come to pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture.scripted_worker import serving, write_script
from capture.templates import HEADINGS, tokenizer

from workbench.capture import probe
from workbench.capture.staging import MemorySink
from workbench.errors import ProbeFailed, StagingError
from workbench.serving.gate import GatedEngine
from workbench.wire import Cause, StagedCall

Row = StagedCall | StagingError
PARIS = {"text": "The capital of France is Paris."}


@dataclass(eq=False)
class SpoiltSink(MemorySink):
    """Keeps what it was given, and gives back what `spoil` makes of it."""

    spoil: Callable[[StagedCall], Row]

    def __post_init__(self) -> None:
        super().__init__()

    async def fetch(self, keys: Sequence[str]) -> list[Row]:
        return [self.spoil(row) if isinstance(row, StagedCall) else row for row in await super().fetch(keys)]


def lost(row: StagedCall) -> Row:
    return StagingError("its storage unit is gone", cause=Cause.MISSING_STAGING_ROW, key=row.staging_key)


def one_sampled_less(row: StagedCall) -> Row:
    mask_T = row.token_mask_delta.copy()
    mask_T[-1] = 0
    return row.model_copy(update={"token_mask_delta": mask_T})


def other_ids(row: StagedCall) -> Row:
    ids_T = row.token_ids_delta.copy()
    ids_T[2] += np.uint64(1)
    return row.model_copy(update={"token_ids_delta": ids_T})


def other_tail(row: StagedCall) -> Row:
    return other_ids(row) if row.parent_call_id else row


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lost, "acknowledged but cannot be read back: its storage unit is gone"),
        (one_sampled_less, r"Field token_ids: \d+ sampled ids were captured, the engine counted \d+"),
        (other_ids, r"Field prompt_token_ids: the engine ran (\d+) ids, the template renders \1 others"),
        (other_tail, "Splice: the child's prompt ends in"),
    ],
)
async def test_the_probe_stops_at_what_was_staged_wrongly(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, spoil: Callable[[StagedCall], Row], says: str
) -> None:
    sink = SpoiltSink(spoil)
    async with serving(chatml_folder, write_script(tmp_path, PARIS), monkeypatch, sink=sink) as (server, _):
        with pytest.raises(ProbeFailed, match=says):
            await server.probe()
        assert sink.rows == {}, "what it staged is cleared all the same"


async def test_the_probe_stops_at_a_generation_that_bypassed_the_capture(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    async with serving(chatml_folder, write_script(tmp_path, PARIS), monkeypatch) as (server, _):
        monkeypatch.setattr(type(server.capture.engine), "generate", GatedEngine.generate)
        with pytest.raises(ProbeFailed, match="nothing was captured"):
            await server.probe()


@pytest.mark.parametrize(("window", "turn"), [(16, "first"), (72, "second")])
async def test_the_probe_stops_at_a_window_too_small_for_its_two_turns(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any, window: int, turn: str
) -> None:
    script = write_script(tmp_path, PARIS)
    async with serving(chatml_folder, script, monkeypatch, max_model_len=window) as (server, _):
        with pytest.raises(ProbeFailed, match=f"refused the probe's {turn} turn with 400"):
            await server.probe()


async def test_the_probe_needs_a_source_to_read_back_from(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    async with serving(chatml_folder, write_script(tmp_path, PARIS), monkeypatch) as (server, _):
        assert server.capture is not None
        monkeypatch.setattr(server.capture, "source", None)
        with pytest.raises(ProbeFailed, match="no staging source"):
            await server.probe()


@pytest.mark.parametrize("name", ["prompt_token_ids", "token_ids", "prompt_logprobs", "logprobs"])
def test_the_probe_stops_at_a_response_that_shows_tokens(name: str) -> None:
    probe._check_no_ids({"choices": [{"message": {}, name: None}]})
    for shown in ({name: [1], "choices": []}, {"choices": [{name: {"content": []}}]}):
        with pytest.raises(ProbeFailed, match=f"Field {name} .* must not leave the worker"):
            probe._check_no_ids(shown)


async def test_a_template_that_rewrites_what_the_model_said_has_nothing_to_compare_with(
    tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / "model"
    tokenizer("qwen").save_pretrained(folder)
    script = write_script(tmp_path, {"text": "I think.</think>\nParis."})
    async with serving(folder, script, monkeypatch) as (server, _):
        found = await server.probe()
    assert (found["prefix_stable"], found["equals_plain_rendering"]) == (False, None)


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("kind", ["headings", "mistral", "airy", "glm"])
async def test_the_probe_passes_what_the_splice_gets_right(
    tmp_path: Path, monkeypatch: Any, kind: str, finish: str
) -> None:
    """Text that begins a string has a space before it in SentencePiece's manner; a line break before the end of a turn
    is the template's own. Neither is a fault of the splice."""
    folder = tmp_path / "model"
    tokenizer(kind).save_pretrained(folder)
    async with serving(folder, write_script(tmp_path, PARIS | {"finish_reason": finish}), monkeypatch) as (server, _):
        assert (await server.probe())["prefix_stable"] is True


async def test_the_probe_stops_at_a_tokenizer_that_writes_a_tail_alone_otherwise_than_in_its_place(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Byte-level with a space before every piece of text, also behind a control token: what is cut off gets one too."""
    from tokenizers import pre_tokenizers

    spaced = copy.deepcopy(tokenizer("chatml"))
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced.chat_template = HEADINGS
    spaced.save_pretrained(tmp_path / "model")
    script = write_script(tmp_path, PARIS | {"finish_reason": "length"})
    async with serving(tmp_path / "model", script, monkeypatch) as (server, _):
        with pytest.raises(ProbeFailed, match="the plain rendering begins with the parent's ids but the spliced"):
            await server.probe()


async def test_the_probe_stops_at_logprobs_of_another_distribution(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    async with serving(chatml_folder, write_script(tmp_path, PARIS), monkeypatch) as (server, _):
        scores = -0.5  # what the script says of every token

        async def score(sequences: list[list[int]]) -> list[list[float]]:
            return [[scores] * (len(ids) - 1) for ids in sequences]

        with monkeypatch.context() as scoring:
            # As of an engine that can score: the scripted one has no distribution.
            scoring.setattr(server, "config", server.config.model_copy(update={"engine": "vllm"}))
            scoring.setattr(server, "score", score)
            assert (await server.probe())["mean_abs_logprob_delta"] == 0.0
            scores = -1.5
            with pytest.raises(ProbeFailed, match=r"Field logprobs: .* differ by 1\.000 on average \(at most 0\.25\)"):
                await server.probe()
