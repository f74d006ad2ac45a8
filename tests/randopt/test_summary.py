"""The summary: every figure of the record's part that a reader needs, and none that was not measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bitsperbyte.randopt import session
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.randopt.summary import summary


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[RandOptConfig], tuple[dict, str]]:
    def go(config: RandOptConfig) -> tuple[dict, str]:
        monkeypatch.setattr(session, "open_engine", lambda config, run_dir, say: FakeEngine())
        part = session.run(config, tmp_path / "run", console=Console(quiet=True)).randopt.model_dump()
        text = "\n".join(summary(part))
        assert (tmp_path / "run" / "run.log").read_text().endswith(text + "\n")
        return part, text

    return go


def test_answers(ran: Callable, config: Callable, tmp_path: Path, slice_path: Path) -> None:
    part, text = ran(config(probes__top=2, heldout={"path": str(slice_path), "source": "source.jsonl", "num_docs": 3, "context": 64}))
    for words in ("base  ", "ensemble of 3", "ensemble of 2 (secondary)", "random ensembles of 3", "base majority of 3", "best single member",
                  "random mixtures", "mixture - random mixture", "sigma 0.1", "probe: rank 2 alone", "seeds/s", "bytes/token", "McNemar"):
        assert words in text, words
    for test in (part["base"]["test"], part["ensemble"]["test"], part["controls"]["best_single"]["test"]):
        assert f"{test['accuracy']:.4f} [{test['low']:.4f}, {test['high']:.4f}], {test['num_correct']} of 16" in text
    assert f"{part['heldout']['mixture']['bpb']:.4f}" in text and "None" not in text and "nan" not in text


def test_documents_and_what_is_off(ran: Callable, config: Callable) -> None:
    part, text = ran(config(task={"name": "likelihood", "num_train": 3, "num_test": 3, "context": 64}, controls__best_single=False))
    assert f"{part['ensemble']['test']['bpb']:.4f} ({part['ensemble']['test']['bytes_per_token']:.3f} bytes/token)" in text
    for words in ("no answers to vote on", "turned off: controls.best_single", "heldout.enabled is off", "scored tokens/s"):
        assert words in text, words
    assert "None" not in text
