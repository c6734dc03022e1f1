"""Views of a foreign ledger say of every rollout what is known to be true of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench import runs
from workbench.inspect import PrefixChain
from workbench.inspect.live.pack import unpack

FOREIGN = Path(__file__).parents[1] / "conformance" / "foreign_ledger"
TRUTH = [json.loads(line) for line in (FOREIGN / "truth.jsonl").read_text().splitlines()]
SAID = {
    "chain": " calls · {tokens} tokens · terminal by heuristic, not verified",
    "abandoned_retry": " · 1 retry · {tokens} tokens · terminal by heuristic, not verified",
    "subagent": " · 1 side conversation · {tokens} tokens · terminal by heuristic, not verified",
    "overflow": " · 1 failed · {tokens} tokens · terminal by heuristic, not verified",
    "final_retry": " · 1 retry · rejected: ambiguous_terminal",
    "compacted": " unresolved · {tokens} tokens · rejected: unresolved_parent",
    "rewritten": " unresolved · {tokens} tokens · rejected: unresolved_parent",
    "stage_failed": " unresolved · {tokens} tokens · rejected: worker_capture_failed",
}


@pytest.fixture(scope="module")
def ledger() -> runs.ForeignLedger:
    return runs.open_ledger(FOREIGN / "ledger")


@pytest.mark.parametrize("truth", TRUTH, ids=lambda truth: f"{truth['rollout_id']}-{truth['shape']}")
def test_a_foreign_rollout_is_shown_as_what_it_is(ledger, truth):
    chain = PrefixChain(ledger, truth["rollout_id"])
    assert SAID[truth["shape"]].format(tokens=f"{truth['longest_chain_tokens']:,}") in repr(chain)
    words, columns = unpack(chain.live.chain.block)
    lost = [
        words["ids"][i]
        for i in range(len(words["ids"]))
        if words["tables"]["failure_reason"][columns["failure_reason"][i]]
    ]
    assert sorted(lost) == sorted(call for call, _ in truth["failures"])
    assert int(((columns["parent"] < 0) & (columns["cum_len"] != words["unknown"])).sum()) == truth["roots"]
    on_chain = {
        words["ids"][i]
        for i in range(len(words["ids"]))
        if words["tables"]["relation"][columns["relation"][i]] == "chain"
    }
    terminal = truth["heuristic"]["terminal"]
    assert (terminal in on_chain) if terminal else not on_chain
    assert chain.custody.state == ("rejected" if "rejected" in repr(chain) else "open")
    assert (chain.custody.digest is not None) == (terminal is not None)
    assert "trained" not in chain.html() + chain.to_text()
    contending = [words["ids"][i] for i in range(len(words["ids"])) if columns["contends"][i]]
    assert len(contending) == (2 if truth["shape"] == "final_retry" else 0)
    assert chain.html().count("one of 2 that could be the last call") == len(contending)
