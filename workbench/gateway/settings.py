"""Settings: everything a gateway process is told at its start, checked before it listens.

Secrets are not among them: `WORKBENCH_CONTROL_TOKEN` (who may freeze and read manifests) and `WORKBENCH_WORKER_TOKEN`
(what the worker expects of its gateway) come from the environment alone.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

CONTROL_TOKEN = "WORKBENCH_CONTROL_TOKEN"
WORKER_TOKEN = "WORKBENCH_WORKER_TOKEN"
# Where the processes of one gateway count together; the name is prometheus_client's.
METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"


class Sampling(BaseModel):
    """What every tagged call is sampled with. The distribution belongs to the recipe, not to the agent."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = 0
    """0: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens a call may sample; an agent may ask for fewer. None: as many as the window holds."""


class GatewaySettings(BaseModel):
    """One gateway. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ledger_dir: str
    """Directory of the custody ledger; several gateways may share it."""
    refused_path: str | None = None
    """File that gets a line for requests that are refused (`refused_log`). None: they are counted alone."""
    worker_url: str | Annotated[list[str], Field(min_length=1)]
    """Base address of the policy worker, without `/v1`; of several workers a list. All calls of a rollout go to one of
    them (`upstream`)."""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0: any free port."""
    workers: int = Field(1, ge=1, le=64)
    """Processes that share the port and the ledger directory; a rollout's calls may land on any of them."""
    control_open: bool = False
    """Whether the control plane answers other machines too. False: only this one, whatever `host` is."""
    model: str = "policy"
    """Name under which the worker serves the policy."""
    sampling: Sampling = Sampling()
    capture_enabled: bool = True
    """False: tagged routes pass everything through untouched, and nothing is recorded."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Longest life of one call, from its admission to its last byte from the worker."""
    coords_timeout_s: float = Field(20.0, gt=0)
    """Longest wait for the worker's acknowledgement once the completion is there."""
    client_timeout_s: float = Field(30.0, gt=0)
    """Longest time that a client may take to send a request's head, its body, and to take what is ready for it."""
    answers_keep_s: float = Field(3600.0, gt=0)
    """How long a rollout's served answers are kept for requests that come again, counted from its last one."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest request body; a bigger one is refused with 413."""
