"""Workspace: what the agent's tools do to the one file that may be changed, in memory.

Invariant: the same calls in the same order give the same file, so the reward can play a transcript again. A wrong call
is answered in words, never raised: it is the model's to learn from. Not here: running the tests (sandbox).
"""

from __future__ import annotations

import json
from typing import Any

from workbench.campaign.environments.file_fix.tasks import Bug

MAX_SOURCE = 20_000


def _tool(name: str, says: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": says, "parameters": schema}}


TOOLS = [
    _tool("read_file", "Show a file.", path="Name of the file."),
    _tool("replace", "Replace a text that occurs once in the file to mend.", old="The text.", new="What replaces it."),
    _tool("run_tests", "Run the tests; shows which fail."),
]


class Workspace:
    """`source` is the file as it now is."""

    def __init__(self, bug: Bug) -> None:
        self.bug = bug
        self.source = bug.source

    def call(self, name: str, arguments: str) -> str | None:
        """The answer to a tool call, or None for `run_tests`, which is the sandbox's."""
        known = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
        if name not in known:
            return f"error: no tool {name!r}; there are {', '.join(known)}"
        try:
            given = json.loads(arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}"
        wrong = [key for key in known[name] if not isinstance(given, dict) or not isinstance(given.get(key), str)]
        if wrong:
            return f"error: {name} needs a text for {', '.join(wrong)}"
        if name == "read_file":
            return self._read(given["path"])
        return self._replace(given["old"], given["new"]) if name == "replace" else None

    def _read(self, path: str) -> str:
        files = {self.bug.file: self.source, self.bug.test_file: self.bug.tests}
        return files.get(path) or f"error: no file {path[:80]!r}; there are {', '.join(files)}"

    def _replace(self, old: str, new: str) -> str:
        times = self.source.count(old) if old else 0
        if times != 1:
            return f"error: this text occurs {times} times in {self.bug.file}; expected once"
        try:
            new.encode()
        except UnicodeEncodeError as error:
            return f"error: the new text is no Unicode text: {error.reason} at character {error.start}"
        changed = self.source.replace(old, new)
        if len(changed) > MAX_SOURCE:
            return f"error: the file would have {len(changed):,} characters; at most {MAX_SOURCE:,}"
        self.source = changed
        return "replaced"
