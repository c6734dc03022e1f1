"""HTML export: an executed notebook as one page that needs nothing else.

In: a notebook. Out: a page with every picture inline, no script, nothing fetched, light and dark. nbconvert's own full
templates load require.js and MathJax from the network, so only its cell rendering is used; the frame is ours.
"""

from __future__ import annotations

import html
import warnings
from pathlib import Path

from nbformat import NotebookNode

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2933;--soft:#52606d;--line:#e4e7eb;--code:#f5f7fa}
@media(prefers-color-scheme:dark){:root{--paper:#16191d;--ink:#e4e7eb;--soft:#9aa5b1;--line:#323f4b;--code:#1f242a}}
body{background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,'DejaVu Sans',sans-serif;margin:0 auto;
max-width:1020px;padding:24px 20px 60px}
h1{font-size:26px;line-height:1.25}h2{font-size:19px;margin-top:2em;border-top:1px solid var(--line);padding-top:1em}
a.anchor-link,.jp-InputPrompt,.jp-OutputPrompt,.prompt{display:none}
pre,code{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:12.5px}
.highlight pre,.input_area pre,.jp-InputArea pre{background:var(--code);border:1px solid var(--line);border-radius:6px;
padding:9px 12px;overflow-x:auto;line-height:1.45}
.output_area pre,.jp-OutputArea pre{white-space:pre-wrap;margin:6px 0}
.output_png img,.jp-RenderedImage img,img{max-width:100%;height:auto;background:none}
blockquote{margin:0 0 1.5em;padding:8px 16px;border-left:4px solid #8a1c4a;background:var(--code)}
.output_error pre,.output_stderr pre{border-left:3px solid #8a1c4a;padding-left:10px}
table{border-collapse:collapse}.output_html{overflow-x:auto}.dataframe{font-size:12.5px}
.dataframe :is(th,td){padding:2px 8px;border:1px solid var(--line)}
.highlight .k,.highlight .kn,.highlight .ow{color:#1f5fa8}.highlight .s1,.highlight .s2{color:#3f8f6b}
.highlight .c1{color:var(--soft);font-style:italic}.highlight .mi,.highlight .mf,.highlight .kc{color:#b35c00}
@media(prefers-color-scheme:dark){.highlight .k,.highlight .kn,.highlight .ow{color:#7fb2e8}
.highlight .s1,.highlight .s2{color:#7fcaa6}.highlight .mi,.highlight .mf,.highlight .kc{color:#f0a860}}
"""


def export_html(notebook: NotebookNode, path: Path, title: str) -> None:
    """Write the page to `path`."""
    from nbconvert import HTMLExporter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
        body, _ = exporter.from_notebook_node(notebook)
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )
