"""The fleet without its parts: however they behave when they are stopped, all are told to, and which failed is said."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from workbench.campaign.fleet import Fleet
from workbench.config import load_recipe
from workbench.errors import DeadlineExceeded


async def test_a_part_that_does_not_stop_is_named_and_keeps_no_other_running(tmp_path):
    said, stopped = [], []
    fleet = Fleet(load_recipe("cpu_smoke", ["deadlines.stop_s=0.1"]), tmp_path, said.append)

    def part(name, end):
        async def stop():
            stopped.append(name)
            await end()

        fleet._stops.append((name, stop))

    async def well():
        pass

    async def broken():
        raise OSError("its socket is gone")

    part("ray", well)
    part("the data plane", asyncio.Event().wait)
    part("the gateway", broken)
    await fleet._stop()
    assert stopped == ["the gateway", "the data plane", "ray"], "in reverse order"
    assert said == [
        "stopping",
        "stopping the gateway failed: OSError: its socket is gone",
        "the data plane did not stop within deadlines.stop_s=0.1",
    ]


async def test_a_trainer_that_takes_too_long_names_the_key_that_bounds_it(tmp_path):
    fleet = Fleet(load_recipe("cpu_smoke"), tmp_path)
    fleet.trainer = SimpleNamespace(ready=SimpleNamespace(remote=asyncio.Event().wait))
    with pytest.raises(DeadlineExceeded, match=r"the trainer did not finish loading.* raise engine\.start_timeout_s"):
        await fleet._trainer_ready(0.01)
