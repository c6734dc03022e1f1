"""Public names: those that other people's code may rely on are there, documented, and cheap to reach."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

STABLE = {
    "wire": "hash_token_ids chain_hash extras_digest staged_call_digest assistant_fingerprint conversation_digest "
    "encode_routes decode_routes classify_route_span CaptureAdmission StagedCall CommitCoords CallRecord "
    "RolloutManifest RolloutReceipt Cause",
    "capture": "CaptureCore StagingSink StagingSource TransferQueueSink TransferQueueSource",
    "ledger": "LedgerStore attribute_terminal select_terminal diagnose_drift assemble_receipt",
    "finalizer": "verify_and_linearize ReceiptRejected LinearizedRow",
    "train": "advantages grpo_loss ReplayBuffer",
    "runs": "open open_ledger",
    "inspect": "PrefixChain TokenStrip PoisonTable LogprobDelta RowDiff CampaignBoard",
}


@pytest.mark.parametrize("room", STABLE)
def test_stable_names_are_exported_and_documented(room):
    module = importlib.import_module(f"workbench.{room}")
    missing = set(STABLE[room].split()) - set(module.__all__)
    assert not missing
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            assert inspect.getdoc(thing), f"workbench.{room}.{name} has no docstring"


def test_the_package_itself_imports_nothing_heavy():
    code = "import sys, workbench; print([m for m in ('torch', 'ray', 'vllm', 'plotly', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
