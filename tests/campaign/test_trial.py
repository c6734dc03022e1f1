"""The doctor's trial: a Ray is started, a row goes through TransferQueue and back, or it is said why not."""

from __future__ import annotations

import socket

import pytest

from workbench.campaign.machines.installed import trial
from workbench.config import load_recipe


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_doctor_starts_ray_and_carries_a_row_through_transferqueue():
    ray, plane = trial(load_recipe("cpu_smoke"))
    assert (ray.what, plane.what) == ("ray", "data plane")
    assert ray.good and "started in" in ray.found, ray
    assert plane.good and "put, read, cleared" in plane.found, plane


def test_doctor_says_why_ray_did_not_start():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (ray,) = trial(load_recipe("cpu_smoke", [f"ray.address={address}"]))
    assert ray.what == "ray" and "nothing answers" in ray.found and ray.cure
