"""ChainWidget: the live PrefixChain, and the strip that shows the tokens of the call that is chosen in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets as t

from workbench.errors import WorkbenchError
from workbench.inspect.live.pack import pack
from workbench.inspect.live.strip import StripWidget
from workbench.inspect.live.widget import LiveWidget, module
from workbench.inspect.token_strip import TokenStrip

if TYPE_CHECKING:
    from workbench.inspect.prefix_chain import PrefixChain

_CHOOSE = "choose a call above (click it, or press Enter)"


class ChainWidget(LiveWidget):
    """`selected` is the id of the call that is chosen, set from either side; empty: none."""

    custody = t.Dict().tag(sync=True)
    chain_name = t.Unicode("").tag(sync=True)
    selected = t.Unicode("").tag(sync=True)
    missing = t.Unicode("").tag(sync=True)

    _esm = module("chain.js")

    @classmethod
    def of(cls, chain: PrefixChain) -> ChainWidget:
        """A widget that shows `chain`."""
        return cls(**cls.traits_for(chain))

    @staticmethod
    def traits_for(chain: PrefixChain) -> dict[str, Any]:
        """The trait values that show `chain`."""
        return {
            "sentence": chain.sentence(),
            "custody": asdict(chain.custody),
            "chain_name": chain.chain_name(),
            "selected": "",
            "block": pack(*chain.columns()),
        }


class ChainAndTokens(ipywidgets.VBox):
    """A chain over the strip of its chosen call; nothing is read before a call is chosen."""

    def __init__(self, chain: PrefixChain | None = None, *, missing: str = "") -> None:
        empty = ChainWidget(sentence="Prefix chain", missing=missing)
        self.chain = empty if chain is None else ChainWidget.of(chain)
        self.tokens = StripWidget(sentence="Tokens", missing=_CHOOSE)
        self._model = chain
        super().__init__([self.chain, self.tokens])
        self.chain.observe(self._open, names="selected")

    def show(self, chain: PrefixChain) -> None:
        """Show another rollout in the same place."""
        self._model = chain
        self.tokens.show_nothing("Tokens", _CHOOSE)
        with self.chain.hold_sync():
            for name, value in ChainWidget.traits_for(chain).items():
                setattr(self.chain, name, value)

    def _open(self, change: dict[str, str]) -> None:
        call_id = change["new"]
        if not call_id or self._model is None:
            return
        source = self._model.source
        heading = f"Tokens up to call {call_id}"
        if source is None:
            self.tokens.show_nothing(heading, "this chain was made from a frame of calls, which holds no tokens")
            return
        try:
            strip = _strip(self._model, source, call_id)
        except WorkbenchError as error:
            self.tokens.show_nothing(heading, str(error))
            return
        strip.start = strip.first_of(call_id)
        self.tokens.show(strip)

    def __repr__(self) -> str:
        return repr(self.chain)


def _strip(chain: PrefixChain, source: Any, call_id: str) -> TokenStrip:
    """The trained row where the call is on it (the trainer's numbers are there), else the path to the call."""
    if chain.custody.state == "verified" and chain.is_on_chain(call_id):
        return TokenStrip(source, chain.rollout_id)
    return TokenStrip(source, chain.rollout_id, call_id=call_id)
