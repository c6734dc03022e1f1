"""Heavy parts that tests share, one of each a session: a Ray, a data plane."""

from __future__ import annotations

import hypothesis
import pytest

# The same examples on every machine: red is then what the change did. `make fuzz` is for finding new ones.
hypothesis.settings.register_profile("the_same_everywhere", derandomize=True, deadline=None)
hypothesis.settings.load_profile("the_same_everywhere")


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """A local Ray of its own with 8 logical CPUs (slots for actors, not processors)."""
    import ray

    from workbench import dataplane
    from workbench.campaign.machines import ray_cluster

    options = {
        "address": "local",
        "num_cpus": 8,
        "include_dashboard": False,
        "log_to_driver": False,
        "configure_logging": False,
        "object_store_memory": 128 * 1024 * 1024,
        "_system_config": dict(dataplane.LOCAL_RAY),
        "runtime_env": {"env_vars": dataplane.environment(5.0, 1), "py_executable": dataplane.interpreter()},
    }
    ray_cluster.start_own(options, 120.0)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def tq(ray_cluster):
    """A running data plane (two storage units), with short limits so that dead parts show soon."""
    from workbench import dataplane

    dataplane.start(storage_units=2, send_recv_timeout_s=5.0, max_attempts=1, start_timeout_s=300.0)
    yield dataplane
    dataplane.stop()


# -- models: built once on this machine, found again afterwards -------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2():
    """Folder of SmolLM2-135M-Instruct."""
    from workbench.models import build

    return build("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_model(smollm2):
    """Folder of the random two-layer model with SmolLM2's vocabulary, tokenizer and chat template."""
    from workbench.models import build

    return build("tiny")


# -- notebooks: executed once a session, for all that look at the result ----------------------------------------------


@pytest.fixture(scope="session")
def executed_notebooks(tmp_path_factory):
    """The shipped notebooks, executed with static views when asked for: `[name]` gives a path, `.all()` a dict."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent / "notebooks"))
    from record_expected import Executed

    return Executed(tmp_path_factory.mktemp("executed"))
