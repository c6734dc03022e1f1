"""Causes: one vocabulary, each with a family and a sentence."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys

import orjson
import pytest

from workbench.wire import Cause


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_family_and_one_sentence(cause: Cause) -> None:
    assert cause.family in ("custody", "verification", "staging", "drift", "routes")
    assert re.fullmatch(r"[A-Z][^\n]{10,120}\.", cause.explanation)
    assert cause.value == cause.name.lower()


def test_a_cause_is_its_wire_string_everywhere() -> None:
    cause = Cause.UNRESOLVED_PARENT
    assert cause == "unresolved_parent" == str(cause) == f"{cause}"
    assert Cause("unresolved_parent") is cause
    assert json.loads(json.dumps(cause)) == orjson.loads(orjson.dumps(cause)) == "unresolved_parent"
    assert pickle.loads(pickle.dumps(cause)) is cause


def test_explanations_are_all_different() -> None:
    assert len({cause.explanation for cause in Cause}) == len(Cause)


def test_the_wire_imports_no_heavy_part() -> None:
    code = (
        "import sys, workbench, workbench.wire, workbench.capture, workbench.finalizer.verify;"
        "print([m for m in ('torch', 'ray', 'vllm', 'plotly', 'pandas', 'transfer_queue') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
