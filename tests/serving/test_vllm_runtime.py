"""What vLLM is started with, as far as that keeps it from dying; no engine is started."""

from __future__ import annotations

import pytest

from workbench import models
from workbench.errors import SetupError
from workbench.serving import vllm_runtime
from workbench.serving.settings import WorkerConfig
from workbench.serving.vllm_runtime import parse_serving_arguments, start_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("sampling", "cpu", "expected"),
    [
        ({}, True, None),
        ({"seed": 3}, True, False),
        ({"seed": 3}, False, None),  # a GPU's generators can be set back: prompts may come in pieces
    ],
)
def test_where_calls_have_seeds_a_cpu_engine_computes_prompts_whole(monkeypatch, sampling, cpu, expected):
    """vLLM 0.32 dies of `CPU Generator does not use offset` where a seeded request's prompt comes in two pieces."""
    monkeypatch.setattr(vllm_runtime, "on_cpu", lambda: cpu)
    config = WorkerConfig(model_path=str(models.build("tiny")), sampling=sampling)
    assert parse_serving_arguments(config).enable_chunked_prefill is expected
    # Whoever knows better says so: further arguments come last.
    forced = config.model_copy(update={"engine_arguments": ["--enable-chunked-prefill"]})
    assert parse_serving_arguments(forced).enable_chunked_prefill is True


def test_an_engine_that_refuses_its_settings_is_quoted_in_a_sentence():
    config = WorkerConfig(model_path=str(models.build("tiny")), max_model_len=10_000)
    with pytest.raises(
        SetupError, match=r"^The vLLM engine did not start: User-specified max_model_len \(10000\)"
    ) as said:
        start_engine(config, parse_serving_arguments(config))
    text = str(said.value)
    assert "Next: the recipe's model and engine values" in text and "\n" not in text and "Traceback" not in text
