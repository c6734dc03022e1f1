"""One segment of a campaign in a process of its own: python resume_case.py RUN_DIR {start|go_on} [key=value ...]

Ray, TransferQueue, gateway, finalizers and trainer are real; the engine replays answers that depend on group, index and
turn alone, so that a group sampled again says the same. Two places wait for ever, where the test wants to kill: the
first attempt of group 1 in a run called `stopped`, and the weight sync of the version in $HOLD_AT_VERSION.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench import models
from workbench.campaign.controller import run_campaign
from workbench.campaign.fleet import Fleet
from workbench.campaign.proof import SyncProof
from workbench.campaign.resume import resumable
from workbench.config import load_recipe

FOR_EVER_S = 600.0
#: What a random model gives every token of its vocabulary: with it the ratios are near 1 and the weights move.
LOGPROB = -10.8

SETTINGS = [
    "engine.kind=scripted", "engine.script_path=campaign.resume_case:reply", "model.dtype=float32",
    "train.steps=4", "train.groups_per_step=2", "train.rollouts_per_group=2", "train.learning_rate=0.01",
    "train.threads=1", "rollouts.max_inflight_groups=4", "checkpoint.every=1", "data_plane.storage_units=1",
]  # fmt: skip


class ScriptedFleet(Fleet):
    """A fleet of its own Ray whose engine has no weights: nothing to prove, and the doctor is not asked."""

    def _check_machine(self) -> None:
        return

    async def prove(self, version: int) -> SyncProof:
        if str(version) == os.environ.get("HOLD_AT_VERSION"):
            await asyncio.sleep(FOR_EVER_S)
        return SyncProof(version, 0.0, 0.0)


@lru_cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(models.resolve("tiny") / "tokenizer.json"))


def reply(rollout_id: str, number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The script of the engine."""
    run, group, index, attempt = ("", "", "", "", *rollout_id.split("."))[-4:]
    ids = _tokenizer().encode(str(random.Random(f"{group}/{index}/{number}").randint(1, 20))).ids
    waits = (run, group, attempt) == ("stopped", "1", "0")
    line = {"token_ids": ids, "logprobs": [LOGPROB] * len(ids)}
    return line | {"delay_s": FOR_EVER_S if waits else 0.0}


async def main(run_dir: Path, how: str, overrides: list[str]) -> None:
    if how == "start":
        recipe = load_recipe("cpu_smoke", [*SETTINGS, *overrides])
    else:
        recipe = resumable(run_dir, overrides)
    await run_campaign(recipe, run_dir, resume=how == "go_on", make_fleet=ScriptedFleet)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
