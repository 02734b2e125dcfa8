"""`make audit`: what it lets pass is what the operations page explains, and silence is no good news."""

from pathlib import Path

from tools import audit

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
EXPLAINED = [
    {"test_id": test, "filename": file, "line_number": 1, "issue_severity": "MEDIUM", "issue_text": "x"}
    for test, file in sorted(audit.EXPLAINED)
]


def report(*more: dict, errors: tuple = ()) -> list[str]:
    return list(audit.of_code({"results": [*EXPLAINED, *more], "errors": list(errors)}))


def test_each_explanation_is_on_the_page() -> None:
    for test, file in audit.EXPLAINED:
        assert f"| {test}, `{file}`" in PAGE
    for advisory in audit.HARMLESS:
        assert advisory in PAGE


def test_what_is_above_low_and_not_explained_is_told() -> None:
    finding = {"test_id": "B602", "filename": "./wire/x.py", "line_number": 7, "issue_text": "shell", "issue_severity": "HIGH"}
    assert report() == []
    assert report(finding) == ["./wire/x.py:7: B602 HIGH shell"]
    assert report(finding | {"issue_severity": "LOW"}) == []
    assert report(finding | {"test_id": "B104"}) != []
    assert report(errors=({"filename": "y.py", "reason": "syntax"},)) == ["y.py: syntax"]


def test_an_explanation_of_what_is_gone_is_told() -> None:
    gone = list(audit.of_code({"results": EXPLAINED[1:], "errors": []}))
    assert len(gone) == 1 and "no longer there" in gone[0]


def test_packages() -> None:
    good = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
    assert list(audit.of_packages([good])) == []
    assert list(audit.of_packages([good, bad])) == ["b 2: PYSEC-1, fixed in 3"]
    assert list(audit.of_packages([{"name": "c", "skip_reason": "not found"}])) == ["c: not audited: not found"]
    assert list(audit.of_packages([])) == ["pip-audit gave no report"]
