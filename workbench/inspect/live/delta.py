"""DeltaWidget: the live LogprobDelta, and the strip that shows a chosen token in its text."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets as t

from workbench.errors import WorkbenchError
from workbench.inspect.live.strip import StripWidget
from workbench.inspect.live.widget import LiveWidget, module
from workbench.inspect.token_strip import TokenStrip

if TYPE_CHECKING:
    from workbench.inspect.logprobs import LogprobDelta

_SHOWN = ("delta", "logprob", "trainer_logprob", "step", "rollout_id", "position", "token_id", "text", "before")


class DeltaWidget(LiveWidget):
    """`parts` are the curves of all tokens, of those at equal weights and of each weight version; `worst` the tokens on
    offer, `chosen` the one that is asked for."""

    parts = t.List(t.Dict()).tag(sync=True)
    edges = t.List(t.Float()).tag(sync=True)
    findings = t.List(t.Dict()).tag(sync=True)
    worst = t.List(t.Dict()).tag(sync=True)
    chosen = t.Int(-1).tag(sync=True)
    missing = t.Unicode("").tag(sync=True)

    _esm = module("delta.js")

    @classmethod
    def of(cls, delta: LogprobDelta) -> DeltaWidget:
        """A widget that shows `delta`."""
        from workbench.inspect.logprobs import LABELS, WORST_LIVE

        if delta.numbers.tokens == 0:
            return cls(sentence=delta.sentence(), missing=delta.why_empty)
        rows = [{name: _sendable(row[name]) for name in _SHOWN if name in row} for row in delta.worst(WORST_LIVE)]
        return cls(
            sentence=delta.sentence(),
            parts=[_part(delta, name, tokens) for name, tokens in delta.parts()],
            edges=delta.histogram(delta.delta_T)[0].tolist(),
            findings=[asdict(verdict) | {"name": LABELS[verdict.name]} for verdict in delta.verdicts],
            worst=rows,
        )


class DeltaAndTokens(ipywidgets.VBox):
    """The differences over the strip of the rollout whose token was chosen."""

    def __init__(self, delta: LogprobDelta) -> None:
        self.delta = DeltaWidget.of(delta)
        self.tokens = StripWidget(sentence="Tokens", missing="choose a token in the table above to see it in its text")
        self._model = delta
        super().__init__([self.delta, self.tokens])
        self.delta.observe(self._open, names="chosen")

    def _open(self, change: dict[str, Any]) -> None:
        if not 0 <= change["new"] < len(self.delta.worst):
            return
        row = self.delta.worst[change["new"]]
        if self._model.source is None:
            self.tokens.show_nothing("Tokens", "this view was made from a frame of log-probs, which holds no rows")
            return
        try:
            strip = TokenStrip(self._model.source, row["rollout_id"], vocabulary=self._model.vocabulary)
        except WorkbenchError as error:
            self.tokens.show_nothing(f"Tokens of {row['rollout_id']}", str(error))
            return
        strip.start = row["position"]
        self.tokens.show(strip)

    def __repr__(self) -> str:
        return repr(self.delta)


def _sendable(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _part(delta: LogprobDelta, name: str, tokens: Any) -> dict[str, Any]:
    from workbench.inspect.logprobs import delta_numbers

    values = tokens["delta"].to_numpy()
    at, mean_abs = delta.by_place(tokens)
    return {
        "name": name,
        "numbers": asdict(delta_numbers(values)),
        "counts": delta.histogram(values)[1].tolist(),
        "at": at,
        "mean_abs": mean_abs,
    }
