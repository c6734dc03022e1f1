"""Verify logs: what a stored run says of itself in lines, where nothing of it can be recomputed.

In: a run directory. Out: differences for lines and files that cannot be read, for a line without what each has, and for
what was trained and has no line; remarks for what was never acknowledged, and for a recipe that is not there. Not here:
the values of a line; ledgers and receipts (ledger, run), which are held against each other.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from workbench.campaign.verify.ledger import LEDGER
from workbench.campaign.verify.report import VerifyReport
from workbench.runs.condition import broken_recipe, broken_status, is_being_written
from workbench.runs.custody import event_files
from workbench.runs.damage import lost_log
from workbench.runs.frames import has_torn_line, scan_lines
from workbench.runs.writer import RunWriter

_ALWAYS = {"steps.jsonl": {"step", "weight_version", "group_ids"}, "groups.jsonl": {"group_id", "step"}}
"""What every line of a log says."""
_TORN = (
    "its last line is torn: whoever wrote it died in the midst of it and told nobody that it exists, so it counts as "
    "never written. Next: nothing to do; who appends next cuts it off"
)
_RESTORE = "Next: restore it from a copy of the run; workbench resume goes by it"


def verify_words(run_dir: Path, report: VerifyReport, *, is_lost: bool) -> None:
    """The status, the recipe, the events and the diagnoses beside the ledgers can be read, to their last lines.
    `is_lost`: a missing recipe is a difference (account), not a remark."""
    for words in broken_status(run_dir):
        report.differs("status.json", None, None, words)
    for words in broken_recipe(run_dir):
        report.differs("recipe.yaml", None, None, f"{words}. {_RESTORE}")
    if not is_lost and not (run_dir / "recipe.yaml").exists():
        report.remarks.append(f"recipe.yaml: this file is missing, so what the run was to do is not known. {_RESTORE}")
    for path in [run_dir / "events.jsonl", *event_files(run_dir / LEDGER)]:
        for words in scan_lines(path).broken:
            report.differs(str(path.relative_to(run_dir)), None, None, words)
    if not is_being_written(run_dir):
        logs = [run_dir / f"{name}.jsonl" for name in RunWriter.FILES]
        logs += sorted((run_dir / LEDGER).glob("[!.]*.jsonl"))
        report.remarks += [f"{path.relative_to(run_dir)}: {_TORN}" for path in logs if has_torn_line(path)]


def recorded(path: Path, key: str, report: VerifyReport) -> set[Any] | None:
    """What a log says is there: a part that is gone altogether is named by nothing else. None for a damaged log."""
    lines = scan_lines(path)
    for words in lines.broken:
        report.differs(path.name, None, None, words)
    for row in lines.rows:
        if lacking := sorted(_ALWAYS[path.name] - row.keys()):
            report.differs(path.name, None, None, f"the line of {row.get(key)!r} has no {', '.join(lacking)}")
    for name, many in Counter(row[key] for row in lines.rows if isinstance(row.get(key), str | int)).items():
        if many > 1:
            report.differs(path.name, None, None, f"has {many} lines of {key.removesuffix('_id')} {name}, expected one")
    return None if lines.broken else {row[key] for row in lines.rows if isinstance(row.get(key), str | int)}


def verify_lines(path: Path, noun: str, named: set[Any] | None, trained: set[Any], report: VerifyReport) -> None:
    """Every step or group that was trained has its line in the log; where none has, that is one difference."""
    lacking = sorted(trained - named) if named is not None else []
    if lacking and not named:
        report.differs(path.name, None, None, lost_log(path, noun, len(trained)))
        return
    for each in lacking:
        report.differs(path.name, None, None, f"has no line of {noun} {each}, which was trained")
