"""StripWidget: the live TokenStrip."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import traitlets as t

from workbench.inspect.live.pack import pack
from workbench.inspect.live.widget import LiveWidget, module

if TYPE_CHECKING:
    from workbench.inspect.token_strip import TokenStrip


class StripWidget(LiveWidget):
    """`at` is the token under the cursor, set from either side; `missing` says why there are no tokens to show."""

    custody = t.Dict().tag(sync=True)
    at = t.Int(-1).tag(sync=True)
    missing = t.Unicode("").tag(sync=True)

    _esm = module("strip.js")

    @classmethod
    def of(cls, strip: TokenStrip) -> StripWidget:
        """A widget that shows `strip`."""
        return cls(**cls.traits_for(strip))

    @staticmethod
    def traits_for(strip: TokenStrip) -> dict[str, Any]:
        """The trait values that show `strip`."""
        return {
            "sentence": strip.sentence(),
            "custody": asdict(strip.custody),
            "block": pack(*strip.columns()),
            "at": strip.start,
            "missing": "",
        }

    def show(self, strip: TokenStrip) -> None:
        """Show another row in the same place."""
        with self.hold_sync():
            for name, value in self.traits_for(strip).items():
                setattr(self, name, value)

    def show_nothing(self, sentence: str, reason: str) -> None:
        """Grey the view out and say why."""
        with self.hold_sync():
            self.sentence, self.missing, self.block = sentence, reason, b""
