"""A stored run of the token-echo arm: opened, looked at and joined again; nothing of it is called verified."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo.test_rows import call

from workbench import runs
from workbench.campaign.verify import verify_run
from workbench.config import load_recipe
from workbench.echo import EchoedCall, assemble_echo
from workbench.echo.finalizer import call_rows
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.finalizer.parts import write_parts
from workbench.inspect import PrefixChain, TokenStrip
from workbench.runs.writer import RunWriter, store_recipe


def chain(rollout: int, second_prompt: list[int]) -> list[EchoedCall]:
    return [call(f"first-{rollout}", [1, 200, 300], [400, 2]), call(f"second-{rollout}", second_prompt, [600, 2])]


@pytest.fixture
def echo_run(tmp_path):
    """Two rollouts of two calls; the second one's first answer was rendered otherwise in its second prompt."""
    run_dir = tmp_path / "echoed"
    run_dir.mkdir()
    store_recipe(run_dir, load_recipe("cpu_smoke", ["token_capture.enabled=false"]).model_dump(mode="json"))
    outcomes = [RolloutOutcome(rollout_id=f"echoed.0.{i}.0", index=i, reward=float(i), task_id="t") for i in range(2)]
    request = FinalizationRequest(group_id="g00000", weight_version=0, rollouts=outcomes)
    chains = {
        "echoed.0.0.0": chain(0, [1, 200, 300, 400, 2, 500]),
        "echoed.0.1.0": chain(1, [1, 200, 301, 2, 500]),
    }
    assembly = assemble_echo(request, chains, 1)
    write_parts(run_dir, request, call_rows(request, chains), assembly)
    keys = [outcome.rollout_id for outcome in outcomes]
    group = FinalizedGroup(
        group_id="g00000", weight_version=0, train_keys=keys, rows=assembly.summaries, metrics=assembly.metrics
    )
    with RunWriter(run_dir) as writer:
        writer.status(status="running", phase="sampling", run="echoed")
        writer.group({"step": 1, **group.store_record()})
        writer.status(status="done", phase="done")
    return run_dir


def test_inspectors_say_that_nothing_vouches_for_it_and_where_it_is_wrong(echo_run):
    run = runs.open(echo_run)
    assert run.groups["echo_wrong_rows"].to_list() == [1]
    assert run.rollouts["verified"].to_list() == [False, False]
    assert repr(PrefixChain(run, "echoed.0.0.0")) == (
        "Rollout echoed.0.0.0 · 2 calls · 8 tokens (4 sampled) · reward 0 · token echo, not verified"
    )
    right, wrong = (str(PrefixChain(run, f"echoed.0.{i}.0").snapshot()) for i in range(2))
    assert "nothing vouches for them" in right and "from token" not in right
    assert "from token 2 on not what the engine ran" in wrong
    assert TokenStrip(run, "echoed.0.0.0").tokens.height == 8
    # A call of this arm holds its whole prompt, so what ran at it is not joined from others.
    assert run.tokens("echoed.0.1.0", "second-1")["token_id"].to_list() == [1, 200, 301, 2, 500, 600, 2]


def test_verify_joins_the_turns_again_and_names_a_changed_token(echo_run):
    assert verify_run(echo_run).ok
    part = echo_run / "rows" / "g00000.parquet"
    table = pq.read_table(part)
    rows = table.column("token_ids").to_pylist()
    rows[0][3] += 1
    place = table.schema.get_field_index("token_ids")
    changed = table.set_column(place, table.schema.field(place), pa.array(rows, table.schema.field(place).type))
    pq.write_table(changed, part)
    (difference,) = verify_run(echo_run).differences
    assert difference.rollout_id == "echoed.0.0.0" and "token_ids differs at 1 positions, first at 3" in difference.what
