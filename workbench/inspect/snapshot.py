"""Snapshot: what an inspector leaves in a notebook that has no kernel.

In: an inspector that knows one sentence, some HTML and, where colour carries meaning, a picture. Out: display data of
plain MIME types (image/png, text/html, text/plain). Invariant: the same records give the same text and the same
pixels, nothing in it is script, and nothing in it is fetched. Not here: what is drawn (one module an inspector), how
widgets look (live).

A notebook front end that is given PNG and HTML in one bundle shows the HTML and hides the picture, and GitHub strips
colours and inline pictures from HTML. So an inspector displays itself as two outputs, picture first, text after it;
`_repr_mimebundle_` still answers with everything for callers that want one bundle. `LiveView` adds a widget over the
same object, shown as the display mode says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from workbench.inspect.mode import display_mode
from workbench.inspect.style import DISPLAY_WIDTH_PX, house_style, png_bytes

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Snapshot:
    """A frozen view: `text` one sentence, `html` inline-styled without script, `png` bytes or None (no picture)."""

    text: str
    html: str
    png: bytes | None

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Display data and its metadata, as IPython's `_repr_mimebundle_` returns them."""
        data: dict[str, Any] = {"text/plain": self.text, "text/html": self.html}
        metadata: dict[str, Any] = {}
        if self.png is not None:
            data["image/png"] = self.png
            metadata["image/png"] = self._of_picture()
        return data, metadata

    def outputs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What a notebook gets, in order: the picture, where there is one, then the text; data and metadata of each."""
        parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if self.png is not None:
            picture = {"image/png": self.png, "text/plain": self.text}
            parts.append((picture, {"image/png": self._of_picture()}))
        return [*parts, ({"text/html": self.html, "text/plain": self.text}, {})]

    def _of_picture(self) -> dict[str, Any]:
        """`alt` is what an exported page says to somebody who does not see the picture."""
        return {"width": DISPLAY_WIDTH_PX, "alt": self.text}


class StaticView(ABC):
    """Base of the inspectors: a sentence, a picture, a text; each built once, when first asked for."""

    _snapshot: Snapshot | None = None

    @abstractmethod
    def sentence(self) -> str:
        """One deterministic line that says what is shown."""

    @abstractmethod
    def html(self) -> str:
        """Inline-styled HTML without script; readable when styles are stripped."""

    def figure(self) -> Figure | None:
        """The picture as a matplotlib figure, or None where it would say nothing that the text does not."""
        with house_style():
            return self.draw()

    def draw(self) -> Figure | None:
        """Draw; called in the house style."""
        return None

    def snapshot(self) -> Snapshot:
        """The static form, the same object at every call."""
        if self._snapshot is None:
            figure = self.figure()
            png = png_bytes(figure) if figure is not None else None
            self._snapshot = Snapshot(text=self.sentence(), html=self.html(), png=png)
        return self._snapshot

    def __repr__(self) -> str:
        return self.sentence()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = self.snapshot().bundle()
        kept = {
            mime: value
            for mime, value in data.items()
            if (not include or mime in include) and (not exclude or mime not in exclude)
        }
        return kept, metadata

    def _ipython_display_(self) -> None:
        self.show_snapshot()

    def show_snapshot(self) -> None:
        """Publish the snapshot as outputs of the running cell."""
        from IPython.display import publish_display_data

        for data, metadata in self.snapshot().outputs():
            publish_display_data(data, metadata)


class LiveView(StaticView):
    """An inspector that is also a widget: `live` is made from the same data as the snapshot, once, when asked for."""

    _live: DOMWidget | None = None
    _fallbacks = 2
    """Outputs that the snapshot is published as: a picture and a text, of every live view."""

    @abstractmethod
    def make_live(self) -> DOMWidget:
        """The widget, not yet shown."""

    @property
    def live(self) -> DOMWidget:
        """The widget alone, to be put beside others; the same object at every call."""
        if self._live is None:
            self._live = self.make_live()
        return self._live

    def _ipython_display_(self) -> None:
        from IPython.display import publish_display_data

        mode = display_mode()
        if mode != "static":
            _first(self.live).fallbacks = 0 if mode == "live" else self._fallbacks
            view = {"version_major": 2, "version_minor": 0, "model_id": self.live.model_id}
            publish_display_data({WIDGET_MIME: view, "text/plain": self.sentence()})
        if mode != "live":
            self.show_snapshot()


def _first(widget: Any) -> Any:
    """The widget at the top: of a box the first in it, which the outputs under the box are told to."""
    while hasattr(widget, "children"):
        widget = widget.children[0]
    return widget
