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


class ChainWidget(LiveWidget):
    """`selected` is the id of the call that is chosen, set from either side; empty: none."""

    custody = t.Dict().tag(sync=True)
    chain_name = t.Unicode("").tag(sync=True)
    selected = t.Unicode("").tag(sync=True)

    _esm = module("chain.js")

    @classmethod
    def of(cls, chain: PrefixChain, *, fallbacks: int = 0) -> ChainWidget:
        """A widget that shows `chain`."""
        return cls(
            sentence=chain.sentence(),
            custody=asdict(chain.custody),
            chain_name=chain.chain_name(),
            block=pack(*chain.columns()),
            fallbacks=fallbacks,
        )


class ChainAndTokens(ipywidgets.VBox):
    """A chain over the strip of its chosen call; nothing is read before a call is chosen."""

    def __init__(self, chain: PrefixChain, *, fallbacks: int = 0) -> None:
        self.chain = ChainWidget.of(chain, fallbacks=fallbacks)
        self.tokens = StripWidget(sentence="Tokens", missing="choose a call above (click it, or press Enter)")
        self.tokens.custody = asdict(chain.custody)
        self._model = chain
        super().__init__([self.chain, self.tokens])
        self.chain.observe(self._open, names="selected")

    def _open(self, change: dict[str, str]) -> None:
        call_id, source = change["new"], self._model.source
        if not call_id:
            return
        heading = f"Tokens up to call {call_id}"
        if source is None:
            self.tokens.show_nothing(heading, "this chain was made from a frame of calls, which holds no tokens")
            return
        try:
            strip = self._strip(source, call_id)
        except WorkbenchError as error:
            self.tokens.show_nothing(heading, str(error))
            return
        strip.start = strip.first_of(call_id)
        self.tokens.show(strip)

    def _strip(self, source: Any, call_id: str) -> TokenStrip:
        """The trained row where the call is on it (the trainer's numbers are there), else the path to the call."""
        if self._model.custody.state == "verified" and self._model.is_on_chain(call_id):
            return TokenStrip(source, self._model.rollout_id)
        return TokenStrip(source, self._model.rollout_id, call_id=call_id)

    def __repr__(self) -> str:
        return repr(self.chain)
