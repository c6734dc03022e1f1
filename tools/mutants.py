"""Mutants: small wrong changes to the code that decides what is trained on, each of which some test must notice.

    python tools/mutants.py              # all of them, a few seconds each; exit 1 where one survives
    python tools/mutants.py splice       # those whose file has this in its path

Each is played on a copy of the package in a temporary directory; the tree is not touched. `tests/test_mutants.py`
checks that every line changed here still exists, so that the list does not rot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """In `file`, `was` (once in it) becomes `becomes`; then `tests` must fail."""

    file: str
    was: str
    becomes: str
    tests: str


MUTANTS = (
    # digests
    Mutant("wire/digests.py", 'head = b"\\x01" + digest_bytes(', 'head = b"\\x00" + digest_bytes(', "conformance"),
    Mutant(
        "wire/digests.py", '_COLUMN_HEAD = struct.Struct(">QQ")', '_COLUMN_HEAD = struct.Struct("<QQ")', "conformance"
    ),
    Mutant("wire/digests.py", "len(raw) != 32 or raw.hex() != value", "len(raw) != 32", "wire"),
    Mutant("wire/digests.py", "        logprobs_be_T.data,\n", "", "conformance"),
    Mutant("wire/digests.py", "if cum_len != prev_len + delta_len:", "if False:", "wire"),
    # verification and linearisation
    Mutant("finalizer/links.py", "if digest != staged.digest:", "if False:", "finalizer/test_verify.py"),
    Mutant(
        "finalizer/links.py", "logprobs_T[:carry].tobytes() != _STEP[: 4 * carry] or ", "", "finalizer/test_verify.py"
    ),
    Mutant("finalizer/verdicts.py", "        if not right:", "        if False:", "finalizer/test_group.py"),
    Mutant(
        "finalizer/verify.py",
        "if len(chain) != len(links) or chain != list(links.values()):",
        "if False:",
        "finalizer/test_verify.py",
    ),
    Mutant(
        "finalizer/verify.py",
        "if parent.cum_len != record.prev_len:",
        "if parent.cum_len < record.prev_len:",
        "finalizer/test_verify.py",
    ),
    Mutant(
        "finalizer/verify.py",
        "if cursor.model_call_id in walked:",
        "if len(walked) > len(records):",
        "finalizer/test_verify.py",
    ),
    Mutant("finalizer/verify.py", "if running != record.chain_hash:", "if False:", "finalizer/test_verify.py"),
    Mutant(
        "finalizer/verify.py",
        "if came != terminal.cumulative_hash:",
        "if False:",
        "finalizer/test_verify.py",
    ),
    Mutant("finalizer/verify.py", "    chain.reverse()\n", "", "finalizer/test_verify.py"),
    # attribution
    Mutant(
        "ledger/attribution.py",
        "if len({_sequence(record) for _, record in witnesses}) > 1:",
        "if False:",
        "ledger/test_attribution.py",
    ),
    Mutant(
        "ledger/attribution.py",
        "record.model_call_id < known.model_call_id",
        "record.model_call_id > known.model_call_id",
        "ledger conformance",
    ),
    Mutant(
        "ledger/attribution.py",
        'return found, "content_ambiguous" if len(found) > 1 else ""',
        'return found[:1], ""',
        "ledger conformance",
    ),
    # splice
    Mutant("capture/splice.py", "        return ids[1:]\n", "        return ids\n", "capture/test_splice.py"),
    Mutant("capture/splice.py", "if after[:upto] != closing[:upto]:", "if False:", "capture/test_splice.py"),
    Mutant("capture/splice.py", "    if len(parts) > 2:", "    if False:", "capture/test_splice.py"),
    # advantages
    Mutant(
        "train/estimators/base.py", "            if valid_N[row]:", "            if True:", "train/test_advantages.py"
    ),
    Mutant("train/estimators/base.py", "max(1.0, float(np.abs(rewards_G).max()))", "1.0", "train/test_advantages.py"),
    Mutant("train/estimators/rloo.py", "(len(rewards_G) - 1)", "len(rewards_G)", "train/test_advantages.py"),
    Mutant("train/estimators/grpo.py", "(size / (size - 1))", "((size - 1) / size)", "train/test_advantages.py"),
    Mutant("train/estimators/grpo.py", "rewards_G.std(ddof=1)", "rewards_G.std()", "train/test_advantages.py"),
)


def verdict_on(mutant: Mutant) -> tuple[bool, str]:
    """Whether some test noticed, and which; else what happened instead."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        for name in ("workbench", "tests", "recipes", "notebooks", "pyproject.toml", "conftest.py"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(place) / name)
        file = Path(place) / "workbench" / mutant.file
        text = file.read_text()
        if text.count(mutant.was) != 1:
            return False, f"the line stands there {text.count(mutant.was)} times: the list is older than the code"
        file.write_text(text.replace(mutant.was, mutant.becomes))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not engine",
             *(f"tests/{test}" for test in mutant.tests.split())],
            cwd=place, env={**os.environ, "PYTHONPATH": place},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return True, failed[0].split(" - ")[0]
    passed = done.returncode == 0
    return False, "its tests pass" if passed else f"its tests did not run: {(done.stdout + done.stderr)[-300:]}"


def main(which: str) -> int:
    if not any(which in mutant.file for mutant in MUTANTS):
        files = ", ".join(sorted({mutant.file for mutant in MUTANTS}))
        print(f"mutants: no file has {which!r} in its path; there are {files}", file=sys.stderr)
        return 2
    survivors = 0
    for mutant in MUTANTS:
        if which in mutant.file:
            killed, why = verdict_on(mutant)
            survivors += not killed
            print(f"{'killed' if killed else 'SURVIVED':9}{mutant.file}: {mutant.was.strip()!r}  {why}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
