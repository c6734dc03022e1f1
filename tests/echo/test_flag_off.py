"""Capture that is switched off leaves no trace: the same traffic and engine inputs as where it cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench import models

PROGRAM = Path(__file__).with_name("flag_off.py")


def run(folder: Path, *flags: str) -> dict:
    from transformers import AutoTokenizer

    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(models.build("tiny"))
    pieces = [tokenizer.convert_tokens_to_ids(piece) for piece in ("G", "u", "ess", ":", "Ġ", "3")]
    whole = tokenizer("Guess: 3", add_special_tokens=False)["input_ids"]
    assert pieces != whole and tokenizer.decode(pieces) == "Guess: 3"
    lines = [{"token_ids": [*whole, tokenizer.eos_token_id]}, {"token_ids": [*pieces, tokenizer.eos_token_id]}]
    script = folder / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, [lines[0]] * 4 + [lines[1]])))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(script), *flags],
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flag_off_identity(tmp_path):
    switched_off = run(tmp_path / "off")
    without = run(tmp_path / "without", "--without-capture")
    assert switched_off["imported"] == without["imported"] == []
    assert switched_off["requests"] == without["requests"]
    assert switched_off["engine"] == without["engine"]
    assert switched_off["rows"] == without["rows"]

    # And it is the token-echo arm that ran: ids on the wire, no custody, turns joined, the re-rendered ones found out.
    assert len(switched_off["requests"]) >= 9
    assert all("return_token_ids" in entry["asked"] for entry in switched_off["requests"])
    assert all('"token_ids"' in entry["answered"] for entry in switched_off["requests"])
    assert not any(name.startswith("x-workbench") for entry in switched_off["requests"] for name in entry["headers"])
    assert switched_off["ledger"] == []
    assert [row[3] for row in switched_off["rows"]] == [None, None, None]
    wrong = [row[4] is not None for row in switched_off["rows"]]
    assert not wrong[0] and wrong[-1]
