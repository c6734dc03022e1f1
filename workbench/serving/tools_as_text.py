"""Tools as text: the tool parser for a recipe that names none. What the model says stays as it is.

vLLM refuses a request with tools where it has no tool parser, and agents send tools whatever model answers them. This
parser lets them in: with `tool_choice` "auto" nothing is read out of the text; "required" and a named tool are JSON by
the engine's own grammar and become calls as with any other parser.
Imports vLLM, so it is imported by the runtime alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, ExtractedToolCallInformation
from vllm.tool_parsers import ToolParser, ToolParserManager

NAME = "workbench_text"


class ToolsAsText(ToolParser):
    """Finds no tool call in any text."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        return DeltaMessage(content=delta_text) if delta_text else None


def register() -> str:
    """Make the parser known to vLLM in this process; returns its name there. Harmless when repeated."""
    ToolParserManager.register_module(name=NAME, module=ToolsAsText)
    return NAME
