"""Trial: start the Ray of a recipe and carry one row through TransferQueue and back, for `workbench doctor`.

    python -m workbench.campaign.machines.trial [KEY=VALUE …]     the section `ray` of a recipe: address, num_cpus

A process of its own: Ray stays in the process that has started it. What worked is one line each on stdout, with its
seconds; what did not is one line on stderr, and the exit code is not 0.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from workbench.errors import ComponentDied, WorkbenchError

START_WITHIN_S = 200.0
ROW_WITHIN_S = 30.0
KEY = "doctor/trial"


def main(settings: Sequence[str]) -> int:
    """`settings` are overrides of a recipe; the rest of it does not matter here. Returns the exit code."""
    import shutil

    import ray

    from workbench import dataplane
    from workbench.campaign.machines import ray_cluster
    from workbench.config import load_recipe

    recipe = load_recipe("cpu_smoke", ["data_plane.storage_units=1", *settings])
    own: str | None = None
    try:
        began = time.monotonic()
        own = ray_cluster.connect(recipe)
        print(f"ray {time.monotonic() - began:.1f}", flush=True)
        plane = recipe.data_plane
        dataplane.start(1, plane.send_recv_timeout_s, plane.max_attempts, START_WITHIN_S)
        try:
            began = time.monotonic()
            asyncio.run(_round_trip())
            print(f"row {time.monotonic() - began:.2f}", flush=True)
        finally:
            dataplane.stop()
    except WorkbenchError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    finally:
        ray.shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    return 0


async def _round_trip() -> None:
    import torch
    from tensordict import TensorDict

    from workbench import dataplane

    put = torch.arange(512, dtype=torch.int64).unsqueeze(0)
    row = TensorDict({"token_ids": put}, batch_size=[1])
    await dataplane.put(dataplane.STAGING, [KEY], row, [{"rollout_id": "doctor", "weight_version": 0}],
                        deadline_s=ROW_WITHIN_S)  # fmt: skip
    came = dataplane.split_rows(await dataplane.get(dataplane.STAGING, [KEY], deadline_s=ROW_WITHIN_S))
    await dataplane.clear(dataplane.STAGING, [KEY], deadline_s=ROW_WITHIN_S)
    left = await dataplane.tags(dataplane.STAGING, deadline_s=ROW_WITHIN_S)
    if len(came) != 1 or came[0]["token_ids"].tolist() != put[0].tolist() or KEY in left:
        raise ComponentDied("TransferQueue gave back another row than was put, or kept one that was cleared")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
