"""BoardWidget: the live CampaignBoard. The browser asks, the kernel reads the files, at most once in `LEAST_S`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import traitlets as t

from workbench.errors import WorkbenchError
from workbench.inspect.live.widget import LiveWidget, module

if TYPE_CHECKING:
    from workbench.inspect.board import CampaignBoard

LEAST_S = 0.5


class BoardWidget(LiveWidget):
    """`frame` is what was read last. The browser sends {"kind": "read"}; the answer is {"kind": "done"}."""

    frame = t.Dict().tag(sync=True)

    _esm = module("board.js")
    _board: CampaignBoard
    _read_at: float

    @classmethod
    def of(cls, board: CampaignBoard) -> BoardWidget:
        """A widget that shows `board` and reads again when it is asked to."""
        widget = cls(sentence=board.sentence(), frame=board.frame)
        widget._board, widget._read_at = board, time.monotonic()
        widget.on_msg(widget._asked)
        return widget

    def _asked(self, _: Any, message: dict[str, Any], __: Any) -> None:
        if message.get("kind") != "read":
            return
        note = ""
        if time.monotonic() - self._read_at >= LEAST_S:
            self._read_at = time.monotonic()
            try:
                frame = self._board.refresh()
            except WorkbenchError as error:
                note = str(error)
            else:
                with self.hold_sync():
                    self.sentence, self.frame = self._board.sentence(), frame
                self._board.keep()
        self.send({"kind": "done", "note": note})
