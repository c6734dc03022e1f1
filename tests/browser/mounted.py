"""Mounted: one live view alone on an empty page, by the same `render({model, el})` that JupyterLab calls.

In: a widget with its data. Out: the page, and how long the view took from having its data to being on the screen. The
model is a stand-in with the widget's traits; what the view would tell the kernel is kept in `window.sent`.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from playwright.sync_api import Browser, Page

from workbench.inspect.live.widget import LiveWidget, stylesheet

_PAGE = """<!doctype html><meta charset="utf-8"><style>{css}</style>
<body data-jp-theme-light="{light}" style="width:{width}px;margin:8px"><div id="view"></div>
<script type="module">
const traits = {traits};
for (const [name, value] of Object.entries(traits)) {{
  if (value && value.bytes !== undefined) {{
    traits[name] = new DataView(Uint8Array.from(atob(value.bytes), (c) => c.charCodeAt(0)).buffer);
  }}
}}
window.sent = [];
const model = {{
  get: (name) => traits[name], set: (name, value) => {{ traits[name] = value; window.sent.push([name, value]); }},
  save_changes() {{}}, send: (message) => window.sent.push(message), on() {{}}, off() {{}},
}};
const view = (await import(URL.createObjectURL(new Blob([{esm}], {{ type: "text/javascript" }})))).default;
const began = performance.now();
await view.render({{ model, el: document.getElementById("view") }});
const ready = () => {{
  if (!document.querySelector("[data-wb-ready]")) return requestAnimationFrame(ready);
  requestAnimationFrame(() => {{ window.paintMs = performance.now() - began; }});
}};
ready();
</script>"""


def mount(
    browser: Browser, widget: LiveWidget, *, width: int = 1000, light: bool = True, **context: Any
) -> tuple[Page, float]:
    """The page with `widget` on it, in a column of `width` px, and the milliseconds until it was painted."""
    page = browser.new_page(viewport={"width": width + 40, "height": 900}, **context)
    parts = {"css": stylesheet(), "traits": _script(_traits(widget)), "esm": _script(str(widget._esm))}
    page.set_content(_PAGE.format(**parts, width=width, light="true" if light else "false"))
    page.wait_for_function("window.paintMs !== undefined", timeout=30_000)
    return page, float(page.evaluate("window.paintMs"))


def _traits(widget: LiveWidget) -> dict[str, Any]:
    own = [name for name in widget.traits(sync=True) if not name.startswith("_") and name not in ("layout", "comm")]
    values = {name: getattr(widget, name) for name in own}
    return {
        name: {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in values.items()
    }


def _script(value: Any) -> str:
    return json.dumps(value).replace("</", "<\\/")


def nodes(page: Page) -> int:
    """How many elements the view has in the document."""
    return int(page.evaluate("document.querySelectorAll('#view *').length"))


def error(page: Page) -> str:
    """The view's error line, empty when there is none."""
    return str(
        page.evaluate("[...document.querySelectorAll('.wb-error:not([hidden])')].map(n => n.textContent).join()")
    )
