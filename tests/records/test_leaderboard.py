from pathlib import Path

import pytest

from bitsperbyte.metric.bpb import Score
from bitsperbyte.records.leaderboard import HEADER, hardware, randopt_result, render
from bitsperbyte.records.schema import RandOptPart, Record
from bitsperbyte.records.store import read_record, write_record
from bitsperbyte.stats.intervals import summarize


def row(label: str = "artifact", nats: float = 700.0, **changes) -> dict:
    score = Score(nats, 1000, 400).to_dict()
    return {
        "label": label,
        "text": "books/val",
        "split_sha256": "ab" * 32,
        "window": 1024,
        "documents": "across",
        **score,
        **changes,
    }


def put(root: Path, folder: str, **changes) -> Record:
    fields = {
        "track": "golf",
        "name": folder,
        "status": "finished",
        "created_utc": "2026-01-31T12:00:00+00:00",
        **changes,
    }
    record = Record(**fields)
    path = root / record.track / f"{record.date}_{folder}"
    path.mkdir(parents=True)
    write_record(path / "record.json", record)
    return record


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Parse the Markdown back: heading -> rows, a further table of a heading under its own line ("Golf: over seeds")."""
    found: dict[str, list[dict[str, str]]] = {}
    section = heading = ""
    columns = None
    for line in text.splitlines():
        if line.startswith("### ") or line == "Over seeds:":
            section = line[4:] if line.startswith("### ") else section
            heading, columns = (section if line.startswith("### ") else f"{section}: over seeds"), None
            found[heading] = []
        elif line.startswith("| "):
            cells = [cell.strip() for cell in line.replace("\\|", "\0").strip().strip("|").split("|")]
            if columns is None:
                columns = cells
            else:
                assert len(cells) == len(columns)
                found[heading].append(dict(zip(columns, cells, strict=True)))
    return found


def test_no_records_yet(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        text = render(root)
        assert text.splitlines()[0] == HEADER and "Generated" in HEADER and "There are none yet." in text


def test_a_full_row(tmp_path: Path) -> None:
    root = tmp_path / "records"
    put(
        root,
        "v7",
        seed=1337,
        provenance={"device": "NVIDIA H200", "num_devices": 2},
        training={
            "num_parameters": 14541744,
            "num_steps": 1234,
            "step_ms_p50": 75.75,
            "num_tokens": 10**9,
            "budget_s": 600.0,
        },
        artifact={
            "scheme": "int6",
            "codec": "zstd",
            "code_bytes": 100,
            "weight_bytes": 10_440_000,
            "total_bytes": 10_440_100,
            "cap_bytes": 16_000_000,
            "margin_bytes": 5_559_900,
        },
        scores=[row("before_quantisation", 690.0), row()],
    )
    ((heading, rows),) = tables(render(root)).items()
    assert heading == "books/val, split `abababababab`: non-overlapping windows of 1024, context across documents"
    assert rows == [
        {
            "date": "2026-01-31",
            "run": "[v7](records/golf/2026-01-31_v7/)",
            "seed": "1337",
            "hardware": "2 x NVIDIA H200",
            "params": "14,541,744",
            "steps": "1,234",
            "step ms": "75.8",
            "tokens": "1,000,000,000",
            "budget s": "600",
            "bpb": "1.0099",
            "bpb before": "0.9955",
            "bytes/token": "2.500",
            "packing": "int6 + zstd",
            "artifact bytes": "10,440,000",
            "total bytes": "10,440,100",
            "margin bytes": "5,559,900",
            "status": "finished",
        }
    ]


def test_unequal_evaluations_never_share_a_table(tmp_path: Path) -> None:
    changes = [
        {},
        {"stride": 64},
        {"window": 512},
        {"documents": "isolated"},
        {"drop_tail": True},
        {"split_sha256": "cd" * 32},
        {"split_sha256": "ab" * 32 + ":first-4096"},
        {"split_sha256": None},
    ]
    for i, change in enumerate(changes):
        put(tmp_path, f"run{i}", scores=[row(**change)])
        put(tmp_path, f"twin{i}", scores=[row(nats=800.0, **change)])
    found = tables(render(tmp_path))
    assert len(found) == len(changes)  # headings differ wherever the evaluation does
    for rows in found.values():
        assert len({r["run"].split("]")[0][-1] for r in rows}) == 1 and len(rows) == 2


def test_scores_of_one_run_under_two_protocols_and_labels(tmp_path: Path) -> None:
    put(
        tmp_path,
        "a",
        scores=[row("before_quantisation"), row(), row(stride=64, nats=680.0), row("second_machine", nats=700.1)],
    )
    found = list(tables(render(tmp_path)).values())
    assert [[r["bpb"] for r in rows] for rows in found] == [["1.0099", "1.0100 (second machine)"], ["0.9810"]]
    assert found[1][0]["bpb before"] == ""


def test_what_was_not_measured_is_blank_and_unfinished_runs_stay(tmp_path: Path) -> None:
    put(tmp_path, "dead", status="crashed", error="boom")
    put(tmp_path, "half", status="interrupted", scores=[row("before_quantisation")])
    found = tables(render(tmp_path))
    assert found["Runs without a score"][0]["status"] == "crashed"
    assert {k: v for k, v in found["Runs without a score"][0].items() if v}.keys() == {"date", "run", "status"}
    (half,) = next(rows for heading, rows in found.items() if heading.startswith("books"))
    assert (half["bpb"], half["bpb before"], half["status"]) == ("", "1.0099", "interrupted")


def test_order_is_by_date_then_name_however_the_disk_lists(tmp_path: Path) -> None:
    put(tmp_path, "b", scores=[row()])
    put(tmp_path, "a", scores=[row()])
    put(tmp_path, "c", scores=[row()], created_utc="2025-12-31T00:00:00+00:00")
    (rows,) = tables(render(tmp_path)).values()
    assert [r["run"][1] for r in rows] == ["c", "a", "b"]
    assert render(tmp_path) == render(tmp_path)


def test_text_cannot_break_the_table(tmp_path: Path) -> None:
    put(tmp_path, "x", name="a|b](http://c)\n| d", scores=[row(text="t|u\n## v")])
    ((heading, rows),) = tables(render(tmp_path)).items()
    assert len(rows) == 1 and "\n" not in heading and rows[0]["date"] == "2026-01-31"


def test_tracks_have_their_own_sections(tmp_path: Path) -> None:
    put(tmp_path, "trained")
    put(tmp_path, "searched", track="randopt", status="crashed")
    golf, _, randopt = render(tmp_path).partition("## RandOpt")
    assert "trained" in golf and "searched" not in golf and "searched" in randopt and "trained" not in randopt


def test_a_full_row_of_a_search(tmp_path: Path, answers_part: dict) -> None:
    root = tmp_path / "records"
    provenance = {"device": "NVIDIA H200", "num_devices": 1, "commit": "0123456789abcdef", "dirty": True}
    put(root, "s", track="randopt", seed=42, provenance=provenance, phases_s={"search": 4.0, "total": 2915.2}, randopt=answers_part)
    ((heading, rows),) = tables(render(root)).items()
    assert heading == "gsm8k, version 1: 200 test questions `cdcdcdcdcdcd`"
    assert rows == [
        {
            "date": "2026-01-31",
            "run": "[s](records/randopt/2026-01-31_s/)",
            "commit": "`012345678`+",
            "seed": "42",
            "model": "tiny",
            "hardware": "NVIDIA H200",
            "pop": "8",
            "K": "2",
            "seeds/s": "2.00",
            "tok/s": "9,045",
            "prompts/s": "36.1",
            "base acc": "25.0% [19.5, 31.4]",
            "ensemble acc": "32.0% [25.9, 38.8]",
            "random-K acc": "28.0% [26.0, 30.0]",
            "base majority acc": "27.5% [21.8, 34.1]",
            "best single acc": "31.0% [25.0, 37.7]",
            "ensemble - base": "+7.0 [+2.0, +12.0]",
            "ensemble - random-K": "+4.0 [-1.0, +9.0]",
            "base bpb": "0.8015",
            "mixture bpb": "0.7999",
            "random mixture bpb": "0.7999 [0.7983, 0.8015]",
            "held-out slice": "fineweb_256.jsonl `efefefef`, windows of 2048, 4.500 bytes/token",
            "total s": "2,915",
            "status": "finished",
        }
    ]


def test_a_row_of_a_likelihood_search(tmp_path: Path, likelihood_part: dict) -> None:
    put(tmp_path, "l", track="randopt", randopt=likelihood_part)
    ((heading, (row,)),) = tables(render(tmp_path)).items()
    assert heading == "likelihood, version 1: 64 test documents `abababababab`, 9,000 bytes scored, windows of 1024"
    cells = {name: row[name] for name in row if name.startswith("test ") or name in ("tok/s", "base bpb", "bytes/token")}
    assert cells == {"tok/s": "1,000", "test base": "0.8015", "test mixture": "0.7855", "test random mixtures": "0.7887 [0.7871, 0.7903]",
                     "test mean member": "0.7935", "test best single": "0.7919", "bytes/token": "4.500", "base bpb": ""}


def test_searches_share_a_table_only_on_equal_tests(tmp_path: Path, answers_part: dict, likelihood_part: dict, edited) -> None:
    parts = [answers_part, likelihood_part, edited(likelihood_part, "task.context", 512)]
    parts += [edited(answers_part, f"task.{name}", value) for name, value in
              (("name", "math500"), ("version", "2"), ("test_sha256", "ee" * 32), ("test_sha256", None))]
    for i, part in enumerate(parts):
        put(tmp_path, f"run{i}", track="randopt", randopt=part)
        put(tmp_path, f"twin{i}", track="randopt", randopt=part)
    put(tmp_path, "dead", track="randopt", status="crashed")
    found = tables(render(tmp_path))
    assert found.pop("Runs without a result")[0]["status"] == "crashed"
    assert len(found) == len(parts)
    for rows in found.values():
        assert len(rows) == 2 and len({r["run"].split("]")[0][-1] for r in rows}) == 1


def test_controls_that_were_off_are_blank(tmp_path: Path, answers_part: dict, edited) -> None:
    off = {"enabled": False, "why": "turned off"}
    made = answers_part
    for name in ("random_k", "base_majority", "best_single"):
        made = edited(made, f"controls.{name}", off)
    made = edited(edited(made, "tests", []), "heldout", off)
    put(tmp_path, "bare", track="randopt", randopt=made)
    ((_, (row,)),) = tables(render(tmp_path)).items()
    blank = {name for name in row if name.endswith(" acc") and not row[name]}
    assert blank == {"random-K acc", "base majority acc", "best single acc"}
    assert not any(row[name] for name in row if "bpb" in name or name.startswith("ensemble -"))


def test_a_result_in_one_line(answers_part: dict, likelihood_part: dict) -> None:
    assert randopt_result(None) == "no result"
    assert randopt_result(RandOptPart(**answers_part)) == (
        "base 25.0% [19.5, 31.4], ensemble 32.0% [25.9, 38.8], random-K 28.0% [26.0, 30.0]"
    )
    assert randopt_result(RandOptPart(**likelihood_part)) == (
        "base 0.8015, ensemble 0.7855, random-K 0.7887 [0.7871, 0.7903] bpb (4.500 bytes/token)"
    )


def test_damaged_record_stops_rendering(tmp_path: Path) -> None:
    put(tmp_path, "a")
    path = tmp_path / "golf" / "2026-01-31_a" / "record.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="is not JSON"):
        render(tmp_path)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, ""),
        ({"device": "NVIDIA H200", "num_devices": 1}, "NVIDIA H200"),
        ({"device": "cpu", "cpu_model": "Xeon", "num_cores": 2}, "Xeon, 2 cores"),
        ({"device": "cpu"}, "cpu"),
    ],
)
def test_hardware_in_words(facts: dict, expected: str) -> None:
    record = Record(
        track="golf", name="x", status="finished", created_utc="2026-01-31T12:00:00+00:00", provenance=facts
    )
    assert hardware(record) == expected


def test_repository_leaderboard_is_current(repo_dir: Path) -> None:
    path = repo_dir / "RECORDS.md"
    assert path.exists(), "RECORDS.md is missing: run `bpb records render`"
    assert path.read_text(encoding="utf-8") == render(repo_dir / "records"), "run `bpb records render`"


def test_runs_that_differ_in_their_seed_alone_get_a_mean(tmp_path: Path) -> None:
    root = tmp_path / "records"
    nats = {1: 700.0, 2: 703.0, 3: 701.0}
    for seed, of_seed in nats.items():
        put(root, f"v7_{seed}", seed=seed, config={"train": {"seed": seed, "lr": 0.1}, "logger": {"run": seed}}, scores=[row(nats=of_seed)])
    path = next(root.glob("golf/*_1/record.json"))
    for name in root.glob("golf/*/record.json"):  # all of one name
        record = read_record(name)
        record.name = "v7"
        write_record(name, record)
    _, (over_seeds,) = tables(render(root)).values()
    summary = summarize([Score(n, 1000, 400).bpb for n in nats.values()])
    assert over_seeds == {"run": "v7", "score": "artifact", "seeds": "1, 2, 3", "n": "3",
                          "mean bpb": f"{summary.mean:.4f}", "sd": f"{summary.sd:.5f}",
                          "95% interval of the mean": f"\\[{summary.interval.low:.4f}, {summary.interval.high:.4f}\\]"}
    for changes in ({"config": {"train": {"seed": 1, "lr": 0.2}}}, {"seed": 2}, {"seed": None}):  # another config, a seed twice, no seed
        record = read_record(path)
        write_record(path, record.model_copy(update=changes))
        assert "| 1, 2, 3 |" not in render(root) and ("Over seeds" in render(root)) == ("seed" not in changes or changes["seed"] is None)
        write_record(path, record)


def published(root: Path, name: str, seed: int, bpb: float, **changes) -> None:
    put(root, f"{name}_{seed}", status="imported", seed=seed, training={"num_steps": 13_780, "step_ms_mean": 43.54},
        artifact={"scheme": "int8", "codec": "zlib", "code_bytes": 47_642, "total_bytes": 15_863_489},
        imported={"source": "x", "scores": [{"label": "final_int8_zlib_roundtrip", "bpb": bpb, "nats_per_token": 2.07, "digits": 8, "stride": 64}],
                  "stated": {"window": 1024}, "unread": ["one line"], **changes})


def test_published_runs_stand_in_a_table_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "records"
    put(root, "own", scores=[row()])
    before = render(root)
    published(root, "baseline", 1337, 1.2243657)
    text = render(root)
    own, others = tables(text).items()
    assert [r["run"] for r in own[1]] == ["[own](records/golf/2026-01-31_own/)"] and others[0] == "Golf: published by others"
    assert tables(before).popitem() == own
    assert {name: others[1][0][name] for name in ("steps", "step ms", "bpb", "window", "stride", "documents", "total bytes", "unread")} == {
        "steps": "13,780", "step ms": "43.54", "bpb": "1.22436570", "window": "*1024*", "stride": "64", "documents": "",
        "total bytes": "15,863,489", "unread": "1"}
    assert render(root) == text


def test_published_runs_without_a_score_or_of_randopt(tmp_path: Path) -> None:
    root = tmp_path / "records"
    published(root, "bare", 1, 1.2, scores=[])
    put(root, "gsm", track="randopt", status="imported", imported={"source": "x", "figures": {"results": {
        "model": "Qwen/Qwen2.5-3B", "dataset": "gsm8k", "base_test_accuracy": 0.61, "ensemble_results": {"8": {"accuracy": 82.5}}}}})
    found = tables(render(root))
    assert found["Golf: published by others"][0]["score"] == ""
    assert found["RandOpt: published by others"][0]["ensembles"] == "K = 8: 82.5%" and "Runs without a result" not in found
