import pytest

from bitsperbyte.run.outcome import EXIT_FAILED, RunFailed, Terminated


def test_run_failed_carries_code_and_status() -> None:
    failure = RunFailed("over the cap", 1, "over_cap")
    assert (str(failure), failure.code, failure.status) == ("over the cap", 1, "over_cap")
    assert (RunFailed("x").code, RunFailed("x").status) == (EXIT_FAILED, "crashed")


def test_termination_unwinds_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise Terminated
    assert not issubclass(Terminated, Exception)
