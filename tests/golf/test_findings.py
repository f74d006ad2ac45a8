"""Three verdicts, and only one of them fails."""

import json

from bitsperbyte.golf.findings import Finding, failed


def test_a_check_that_could_not_be_made_has_not_failed() -> None:
    findings = [Finding("a", True, "seen"), Finding("b", None, "unseen"), Finding("c", False, "wrong")]
    assert [f.verdict for f in findings] == ["passed", "not checked", "FAILED"] and failed(findings) == findings[2:]
    assert json.loads(json.dumps([f.to_dict() for f in findings]))[1] == {"check": "b", "ok": None, "detail": "unseen"}


def test_a_detail_cannot_steer_the_terminal() -> None:
    assert Finding("a", True, "x\x1b[2Jy\nz").line == "passed: x\ufffd[2Jy\ufffdz"
