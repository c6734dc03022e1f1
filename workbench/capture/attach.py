"""Attach: everything that capture adds to a policy worker, in one object.

    serving app ─▶ wrap_engine(engine) ─▶ engine          HTTP ─▶ wrap_app(app) ─▶ app
A worker without capture never imports this package; what it then serves is the engine's own.
Not here: how a call is captured (engine, splice, core), how it is admitted (transport).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.capture.core import CaptureCore, StagingSink, StagingSource
from workbench.capture.engine import CapturingEngine
from workbench.capture.prefix import PrefixStore
from workbench.capture.routes import RouteCapture, TakeRoutes
from workbench.capture.splice import Splicer
from workbench.capture.transport import CallBoard, CaptureGate
from workbench.serving.door import App
from workbench.serving.gate import GenerationGate

if TYPE_CHECKING:
    from workbench.serving.settings import WorkerConfig


class Capture:
    """The capture of one worker. `sink` stages calls, `source` reads back a parent's ids that are not in memory."""

    def __init__(
        self,
        config: WorkerConfig,
        sink: StagingSink,
        source: StagingSource | None,
        weight_version: Callable[[], int],
    ) -> None:
        self.source = source
        self.board = CallBoard()
        self.prefixes = PrefixStore(source, config.cache_bytes)
        self.engine: CapturingEngine | None = None
        """The engine as the serving app sees it; None until `wrap_engine`."""
        self.take_routes: TakeRoutes | None = None
        """Where routed experts come from when the engine's outputs do not carry them; set before `wrap_engine`."""
        self._config = config
        self._weight_version = weight_version
        self._core = CaptureCore(sink, weight_version, sink_timeout_s=config.sink_timeout_s)
        self._splicer: Splicer | None = None

    def wrap_engine(self, engine: Any, gate: GenerationGate, tokenizer: Any, stops: set[int]) -> CapturingEngine:
        """The engine client for the serving app; also puts the prefix splice into the engine's renderer."""
        self.engine = CapturingEngine(
            engine,
            self._core,
            self.board,
            self.prefixes,
            gate,
            self._config.sampling,
            self._config.logprobs_mode,
            self._weight_version,
            RouteCapture(self.take_routes) if self._config.capture_routes else None,
        )
        self._splicer = Splicer(tokenizer, stops, self.prefixes)
        self._splicer.install(engine.renderer)
        return self.engine

    def wrap_app(self, app: App) -> App:
        """The serving app behind the gate that admits tagged calls and answers for their coordinates."""
        return CaptureGate(app, self.board, answer_timeout_s=self._config.sink_timeout_s + 5.0)

    def status(self) -> dict[str, Any]:
        """What the worker's status says of capture."""
        return {
            "live_calls": self.board.live_calls,
            "cache_bytes": self.prefixes.bytes_held,
            "cache_hits": self.prefixes.hits,
            "prefix_fetches": self.prefixes.fetches,
            "sampling_overrides": dict(self.engine.overrides) if self.engine else {},
        } | ({"route_faults": dict(self.engine.routes.faults)} if self.engine and self.engine.routes else {})

    async def close(self, timeout_s: float) -> None:
        """Let recordings end, at most `timeout_s` seconds, and take the splice out of the renderer."""
        if self.engine is not None:
            await self.engine.drain(timeout_s)
        if self._splicer is not None:
            self._splicer.close()
