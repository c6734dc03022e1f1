"""Every case of the corpora beside this file, and the report that `workbench conformance` gives of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.campaign.conformance import KINDS, check_case, first_difference, kind_of, main, run_conformance
from workbench.campaign.conformance_cases import RUNNERS
from workbench.errors import SetupError

HERE = Path(__file__).parent


def cases(*kinds: str) -> list[Any]:
    return [
        pytest.param(kind, json.loads(line), id=f"{kind}-{number}")
        for kind in kinds
        for number, line in enumerate((HERE / f"{kind}.jsonl").read_text().splitlines(), 1)
    ]


@pytest.mark.parametrize(("kind", "case"), cases(*(kind for kind in KINDS if kind != "ledger")))
def test_case(kind: str, case: dict[str, Any]) -> None:
    expected = case.pop("expect")  # taken away before the code under test runs
    assert RUNNERS[kind](case["case"], case["input"]) == expected


@pytest.mark.parametrize(("kind", "case"), cases("ledger"))
def test_ledger_case(kind: str, case: dict[str, Any]) -> None:
    expected = case.pop("expect")
    resolutions = [operation.pop("expect") for operation in case["input"] if operation["op"] == "resolve"]
    came = RUNNERS[kind](case["case"], (expected["manifest"]["rollout_id"], case["input"]))
    assert came == {"resolutions": resolutions, **expected}


@pytest.mark.parametrize(("kind", "case"), cases(*KINDS))
def test_the_kind_of_a_case_is_told_without_the_name_of_its_file(kind: str, case: dict[str, Any]) -> None:
    assert kind_of(case) == kind


def test_the_report_counts_every_case_of_every_kind() -> None:
    report = run_conformance([HERE])
    assert report.ok, str(report)
    assert report.passed == {kind: len(cases(kind)) for kind in KINDS}


def corrupt(value: Any) -> Any:
    """The same expectation with its first leaf changed."""
    if isinstance(value, dict) and value:
        key = next(iter(value))
        return {**value, key: corrupt(value[key])}
    if isinstance(value, list) and value:
        return [corrupt(value[0]), *value[1:]]
    if isinstance(value, str) and value:
        return value[:-1] + ("0" if value[-1] != "0" else "1")
    return "changed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_expectation_is_a_failure_that_names_the_field(kind: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (HERE / f"{kind}.jsonl").read_text().splitlines()]
    for line in lines:
        line["expect"] = corrupt(line["expect"])
    path = tmp_path / "renamed-by-somebody.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run_conformance([path])
    assert not report.ok
    # One operation list of a ledger says its outcome in several places; any of them may be the changed one.
    assert report.failed == {kind: len(lines)} and not report.passed
    assert [failure.line for failure in report.failures] == list(range(1, len(lines) + 1))
    assert all(failure.expected != failure.came for failure in report.failures)
    assert str(path) in str(report)


def test_a_changed_input_of_a_digest_case_is_noticed() -> None:
    case = json.loads((HERE / "digests.jsonl").read_text().splitlines()[1])
    case["input"]["token_ids_delta"] = [1]
    kind, failure = check_case(case, "some.jsonl", 2)
    assert kind == "digests" and failure is not None and failure.line == 2


def test_lines_of_no_kind_fail_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"case": "what", "input": 3, "expect": 4}\n')
    report = run_conformance([path])
    assert report.failed == {"unknown": 1} and "what" in str(report)


def test_paths_that_hold_no_corpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="does not exist"):
        run_conformance([tmp_path / "missing.jsonl"])
    with pytest.raises(SetupError, match=r"no \*\.jsonl"):
        run_conformance([tmp_path])
    (tmp_path / "broken.jsonl").write_text('{"case": \n')
    with pytest.raises(SetupError, match=r"broken\.jsonl:1 is not JSON"):
        run_conformance([tmp_path])


def test_the_first_difference_names_a_path() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ("a[1].b", "2", "3")
    assert first_difference([1.0], [1]) == ("[0]", "1.0", "1")
    assert first_difference([1, 2], [1]) == (".length", "2", "1")
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) == ("b", '"<absent>"', "2")
    assert first_difference({"a": [1]}, {"a": [1]}) is None


def test_the_command_prints_what_failed_and_how_and_says_so_by_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "digest.jsonl"
    lines = (HERE / "digests.jsonl").read_text().splitlines()[:2]
    corpus.write_text("\n\n".join(lines) + "\n")
    assert main([corpus]) == 0
    case = json.loads(lines[0])
    corpus.write_text(json.dumps(case | {"input": {"no": "call"}}) + "\n")
    assert main([corpus]) == 1
    assert "Error" in capsys.readouterr().out
    corpus.write_text("\n")
    with pytest.raises(SetupError, match="holds no case"):
        main([corpus])


def test_a_ledger_case_of_an_unknown_operation_is_a_failed_case() -> None:
    case = json.loads((HERE / "ledger.jsonl").read_text().splitlines()[0])
    case["input"] = [{"op": "forget"}]
    kind, failure = check_case(case)
    assert kind == "ledger" and failure is not None and "has operations resolve, record, record_failure" in str(failure)
