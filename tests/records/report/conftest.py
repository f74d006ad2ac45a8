"""Real tiny runs to report on, and a way to draw their figures without the cost of a layout."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.session import train
from bitsperbyte.randopt import session
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.records.report.drawing import Canvas, Plot, Sheet
from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.slices import Request, make_slice

TEXTS = [f"Übung {n} – {n * n} naïve cafés, and {n % 7} more." for n in range(80)]


@pytest.fixture(scope="session")
def golf_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of twelve steps under two seeds. In the rows of the first, steps 9 and 10 stand twice, as after a kill at step 8."""
    home = tmp_path_factory.mktemp("report")
    (home / "source.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(str(home / "source.jsonl"), "byte", home / "data", val_docs=10)
    runs = []
    for seed in (1, 2):
        config = GolfConfig.model_validate({
            "name": f"tiny{seed}", "data": {"path": str(home / "data")},
            "model": {"vocab_size": 260, "dim": 16, "num_heads": 2, "num_kv_heads": 2, "order": [0], "skips": []},
            "schedule": {"wallclock_s": None, "max_steps": 12, "warmdown": {"steps": 4}, "warmup_steps": 0},
            "train": {"batch_tokens": 64, "seq_len": 16, "micro_batch_tokens": 64, "device": "cpu", "seed": seed},
            "eval": {"every_steps": 4, "max_tokens": 300}})
        train(config, home / f"run{seed}")
        runs.append(home / f"run{seed}")
    metrics = runs[0] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    cut = next(i for i, row in enumerate(rows) if row.get("step") == 9)
    lost = [{**row, "loss": 99.0, "step_ms": 9e6} for row in rows[cut:] if "loss" in row and row["step"] in (9, 10)]
    again = [row for row in rows if "val_loss" in row and row["step"] == 8]
    resume = {"event": "resume", "from_step": 8, "elapsed_s": lost[-1]["elapsed_s"]}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in (*rows[:cut], *lost, resume, *again, *rows[cut:])))
    return runs


def settings(home: Path, **overrides: Any) -> RandOptConfig:
    return RandOptConfig.model_validate({
        "name": "votes", "model": {"path": "fake"}, "task": {"name": "arithmetic", "num_train": 12, "num_test": 24},
        "noise": {"sigmas": [0.1, 0.2]}, "search": {"population": 12, "top_k": 3, "secondary_k": [1, 2]}, "controls": {"control_pool": 6},
        "heldout": {"path": str(home / "slice.jsonl"), "source": str(home / "source.jsonl"), "num_docs": 3, "context": 64},
        "probes": {"top": 2}, **overrides})


@pytest.fixture(scope="session")
def randopt_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs by an engine that needs no model: of questions (`answers`), of documents (`documents`), and one interrupted at its seventh
    member (`interrupted`)."""
    home = tmp_path_factory.mktemp("votes")
    (home / "source.jsonl").write_text("".join(json.dumps({"text": f"document {i} " + "words " * (20 + i)}) + "\n" for i in range(40)))
    make_slice(Request(str(home / "source.jsonl"), num_docs=3, min_chars=1), home / "slice.jsonl")
    documents = {"name": "likelihood", "data": str(home / "source.jsonl"), "num_train": 4, "num_test": 16, "context": 64}

    switches: list[Any] = []

    def stop(call: tuple[Any, ...]) -> None:
        switches.extend([call] if call[0] == "perturb" else [])
        if len(switches) == 7:
            raise KeyboardInterrupt

    runs = {"answers": (settings(home), FakeEngine()), "documents": (settings(home, task=documents), FakeEngine()),
            "interrupted": (settings(home), FakeEngine(on_call=stop))}
    with pytest.MonkeyPatch.context() as patch:
        for name, (config, engine) in runs.items():
            patch.setattr(session, "open_engine", lambda config, run_dir, say, engine=engine: engine)
            try:
                session.run(config, home / name, console=Console(quiet=True))
            except KeyboardInterrupt:
                assert name == "interrupted"
    return {name: home / name for name in runs}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Canvas]]:
    """Figures are drawn, but neither laid out nor written: the page holds empty elements. Gives (name, canvas) of what was drawn."""
    drawn: list[tuple[str, Canvas]] = []

    def svg(self: Plot, sheet: Sheet) -> str:
        from matplotlib.figure import Figure

        canvas = Canvas(sheet, Figure())
        self.draw(canvas)
        drawn.append((self.name, canvas))
        return f'<svg class="{sheet.kind}"></svg>'

    monkeypatch.setattr(Plot, "svg", svg)
    monkeypatch.setattr(Plot, "png", lambda self: b"\x89PNG")
    return drawn
