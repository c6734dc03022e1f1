"""DiffWidget: the live RowDiff."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import traitlets as t

from workbench.errors import WorkbenchError
from workbench.inspect.live.pack import pack
from workbench.inspect.live.widget import LiveWidget, module

if TYPE_CHECKING:
    from workbench.inspect.row_diff import RowDiff
    from workbench.inspect.token_strip import TokenStrip

MOST_FLIPS = 2_000


class DiffWidget(LiveWidget):
    """`chosen` is the pair of rollout ids that is asked for; `one`, `other` and `block` (equal stretches) show it."""

    chosen = t.List(t.Unicode()).tag(sync=True)
    one = t.Bytes(b"").tag(sync=True)
    other = t.Bytes(b"").tag(sync=True)
    heads = t.List(t.Dict()).tag(sync=True)
    arms = t.Dict().tag(sync=True)
    missing = t.Unicode("").tag(sync=True)

    _esm = module("diff.js")
    _model: RowDiff

    @classmethod
    def of(cls, diff: RowDiff) -> DiffWidget:
        """A widget that shows `diff` and, when a flip is chosen, that pair."""
        widget = cls(
            sentence=diff.sentence(),
            arms=_arms(diff),
            chosen=list(diff.names),
            **_pair(diff, *diff.strips),
        )
        widget._model = diff
        widget.observe(widget._open, names="chosen")
        return widget

    def _open(self, change: dict[str, Any]) -> None:
        one, other = change["new"]
        try:
            values = _pair(self._model, *self._model.strips_of(one, other)) | {"missing": ""}
        except WorkbenchError as error:
            values = {"missing": str(error)}
        with self.hold_sync():
            for name, value in values.items():
                setattr(self, name, value)


def _pair(diff: RowDiff, one: TokenStrip, other: TokenStrip) -> dict[str, Any]:
    stretches, first = diff.alignment(one, other)
    table = np.array(stretches, dtype=np.int32).reshape(-1, 3)
    columns = {name: table[:, k] for k, name in enumerate(("one", "other", "length"))}
    heads = [{"name": strip.rollout_id, "custody": asdict(strip.custody)} for strip in (one, other)]
    return {
        "one": pack(*one.columns()),
        "other": pack(*other.columns()),
        "block": pack({"first": first}, columns),
        "heads": heads,
    }


def _arms(diff: RowDiff) -> dict[str, Any]:
    if diff.pairs is None or diff.flips is None:
        return {}
    return {
        "pairs": diff.pairs.height,
        "unpaired": list(diff.unpaired),
        "differences": [asdict(difference) for difference in diff.differences],
        "flips": diff.flips.head(MOST_FLIPS).to_dicts(),
        "all_flips": diff.flips.height,
    }
