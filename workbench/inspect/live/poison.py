"""PoisonWidget: the live PoisonTable, and the chain of the rejected rollout that is chosen in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets as t

from workbench.errors import WorkbenchError
from workbench.inspect.causes import explain, explain_failure, in_words
from workbench.inspect.live.chain import ChainAndTokens
from workbench.inspect.live.widget import LiveWidget, module
from workbench.inspect.prefix_chain import PrefixChain
from workbench.inspect.tables import place_of
from workbench.runs.refused import by_code

if TYPE_CHECKING:
    from workbench.inspect.tables import PoisonTable

MOST_ROLLOUTS = 3_000


class PoisonWidget(LiveWidget):
    """`rollouts` are the rejected ones (`total` of them); `chosen` is the id of the one whose chain is asked for."""

    causes = t.List(t.Dict()).tag(sync=True)
    steps = t.List(t.Int()).tag(sync=True)
    by_step = t.List(t.Dict()).tag(sync=True)
    drift = t.List(t.Dict()).tag(sync=True)
    failures = t.List(t.Dict()).tag(sync=True)
    refused = t.List(t.Dict()).tag(sync=True)
    refused_words = t.Unicode("").tag(sync=True)
    rollouts = t.List(t.Dict()).tag(sync=True)
    total = t.Int(0).tag(sync=True)
    chosen = t.Unicode("").tag(sync=True)

    _esm = module("poison.js")

    @classmethod
    def of(cls, table: PoisonTable) -> PoisonWidget:
        """A widget that shows `table`."""
        share = max(1, table.total)
        causes = [
            {"cause": row["cause"], "rollouts": row["rollouts"], "share": row["rollouts"] / share}
            | {"meaning": explain(row["cause"])}
            for row in table.causes.to_dicts()
        ]
        rollouts = [
            row
            | {"where": place_of(row["call_id"], row["position"], row["rollout_id"])}
            | {"detail": in_words(row["detail"], row["cause"]) or None}
            for row in table.rejected.head(MOST_ROLLOUTS).to_dicts()
        ]
        failures = [
            row | {"meaning": explain_failure(row["failure_reason"], row["detail"])}
            for row in table.failures.to_dicts()
        ]
        return cls(
            sentence=table.sentence(),
            causes=causes,
            steps=sorted(set(table.by_step["step"].to_list())),
            by_step=table.by_step.to_dicts(),
            drift=table.drift.head(MOST_ROLLOUTS).to_dicts() if table.drift_is_known else [],
            failures=failures,
            refused=[] if table.refused is None else by_code(table.refused).to_dicts(),
            refused_words=table.refused_words or "",
            rollouts=rollouts,
            total=table.rejected.height,
        )


class PoisonAndChain(ipywidgets.VBox):
    """The causes over the chain of a chosen rollout."""

    def __init__(self, table: PoisonTable) -> None:
        self.causes = PoisonWidget.of(table)
        self.rollout = ChainAndTokens(missing="choose a rejected rollout above to see its calls")
        self._source = table.source
        super().__init__([self.causes, self.rollout])
        self.causes.observe(self._open, names="chosen")

    def _open(self, change: dict[str, Any]) -> None:
        if not change["new"]:
            return
        try:
            self.rollout.show(PrefixChain(self._source, change["new"]))
        except WorkbenchError as error:
            self.causes.send({"note": str(error)})

    def __repr__(self) -> str:
        return repr(self.causes)
