"""From documents to a verified folder: nothing of val in train, equal text equal bytes, and clean restarts."""

import fcntl
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bitsperbyte.cli.data import app
from bitsperbyte.text import encode
from bitsperbyte.text import prepare as prepare_module
from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.shards import DataFolder, open_shard
from bitsperbyte.text.tokenizers import load_tokenizer

TEXTS = [f"Document number {n} says {n * n} things about {'this' if n % 2 else 'that'}." for n in range(200)]


def jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def documents(folder: Path, split: str) -> list[str]:
    """What the shards of a split hold, cut at BOS and decoded."""
    data = DataFolder.open(folder)
    tokens = np.concatenate([open_shard(shard.path) for shard in data.shards(split)])
    assert tokens[0] == data.tokenizer.bos_id
    return [
        data.tokenizer.decode(part[1:])
        for part in np.split(tokens, np.flatnonzero(tokens == data.tokenizer.bos_id))[1:]
    ]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "source.jsonl", TEXTS)


def test_documents_come_back_in_order_and_the_manifest_counts_them(source: Path, tmp_path: Path) -> None:
    manifest = prepare(str(source), "byte", tmp_path / "out", val_fraction=0.2)
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert set(train) | set(val) == set(TEXTS) and len(train) + len(val) == len(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)] and val == [
        text for text in TEXTS if text in set(val)
    ]
    assert 20 < len(val) < 60
    for split, texts in (("train", train), ("val", val)):
        part = manifest["splits"][split]
        num_bytes = sum(len(text.encode()) for text in texts)
        assert (part["num_documents"], part["num_bytes"], part["counted_bytes"]) == (len(texts), num_bytes, num_bytes)
        assert part["num_tokens"] == num_bytes + len(texts)
        DataFolder.open(tmp_path / "out").verify(split)
    assert manifest["proof"]["train"]["lost_bytes"] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train_000000.bin",
        "val_000000.bin",
    ]
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    assert str(tmp_path) not in (tmp_path / "out/manifest.json").read_text()  # no path of this machine


def test_a_growing_corpus_keeps_its_split_and_a_seed_changes_it(source: Path, tmp_path: Path) -> None:
    prepare(str(source), "byte", tmp_path / "a", val_fraction=0.2)
    prepare(
        str(jsonl(tmp_path / "more.jsonl", TEXTS[::-1] + ["new 1", "new 2"])), "byte", tmp_path / "b", val_fraction=0.2
    )
    prepare(str(source), "byte", tmp_path / "c", val_fraction=0.2, seed=1)
    before = set(documents(tmp_path / "a", "val"))
    assert set(documents(tmp_path / "b", "val")) - {"new 1", "new 2"} == before
    assert set(documents(tmp_path / "c", "val")) != before


@pytest.mark.parametrize("options", [{"val_docs": 30}, {"val_fraction": 0.2}])
def test_copies_of_val_documents_are_dropped_and_counted(tmp_path: Path, options: dict) -> None:
    path = jsonl(tmp_path / "twice.jsonl", TEXTS + TEXTS)
    manifest = prepare(str(path), "byte", tmp_path / "out", **options)
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert not set(train) & set(val) and len(set(val)) == len(val)
    assert manifest["num_duplicates_dropped"] == len(val) and len(train) == 2 * (len(TEXTS) - len(val))
    if "val_docs" in options:
        assert val == TEXTS[:30]


def test_shards_are_cut_at_the_size_and_join_to_the_same_stream(source: Path, tmp_path: Path) -> None:
    one = prepare(str(source), "byte", tmp_path / "one")
    many = prepare(str(source), "byte", tmp_path / "many", shard_tokens=1000)
    sizes = [row["num_tokens"] for row in many["splits"]["train"]["files"]]
    assert len(sizes) > 5 and set(sizes[:-1]) == {1000} and sum(sizes) == one["splits"]["train"]["num_tokens"]
    assert documents(tmp_path / "one", "train") == documents(tmp_path / "many", "train")


def test_batches_do_not_change_the_result(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(str(source), "byte", tmp_path / "a")
    monkeypatch.setattr(encode, "_BATCH_BYTES", 100)
    assert prepare(str(source), "byte", tmp_path / "b") == whole


def test_a_trained_tokenizer_sees_only_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{text} Some more words {text.split()[2]} follow here." for text in TEXTS]
    path, seen = jsonl(tmp_path / "s.jsonl", texts), []
    real = prepare_module.train_sentencepiece
    monkeypatch.setattr(
        prepare_module,
        "train_sentencepiece",
        lambda texts, size, out: real((seen.append(text) or text for text in texts), size, out),
    )
    manifest = prepare(str(path), "train:300", tmp_path / "out", val_fraction=0.2)
    assert seen == documents(tmp_path / "out", "train")
    assert manifest["tokenizer"]["vocab_size"] == DataFolder.open(tmp_path / "out").tokenizer.vocab_size == 300
    again = prepare(
        str(path), str(tmp_path / "out" / manifest["tokenizer"]["file"]), tmp_path / "again", val_fraction=0.2
    )
    assert again["splits"] == manifest["splits"] and again["tokenizer"] == manifest["tokenizer"]


def test_a_long_document_is_whole(tmp_path: Path) -> None:
    book = "A sentence of a long book, and then another. " * 40_000
    prepare(str(jsonl(tmp_path / "s.jsonl", ["short", book, "end"])), "byte", tmp_path / "out", val_docs=1)
    assert documents(tmp_path / "out", "train") == [book, "end"]


def test_what_is_there_is_returned_only_for_equal_arguments(source: Path, tmp_path: Path) -> None:
    manifest = prepare(str(source), "byte", tmp_path / "out")
    stamp = (tmp_path / "out/train_000000.bin").stat().st_mtime_ns
    assert prepare(str(source), "byte", tmp_path / "out") == manifest
    assert (tmp_path / "out/train_000000.bin").stat().st_mtime_ns == stamp
    for options, what in (
        ({"val_docs": 3}, "val: there 0.05, asked 'first 3 documents'"),
        ({"limit_docs": 100}, "limit_docs"),
        ({"tokenizer": "train:300"}, "tokenizer: there 'byte'"),
    ):
        with pytest.raises(ValueError, match=f"already holds other data .*{what}"):
            prepare(str(source), **{"tokenizer": "byte", "out": tmp_path / "out", **options})
    jsonl(source, TEXTS[:-1])
    with pytest.raises(ValueError, match="fingerprint"):
        prepare(str(source), "byte", tmp_path / "out")


def test_an_interrupted_preparation_starts_over_cleanly(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    calls = []

    def interrupt(what: str, done: int, total: int | None) -> None:
        calls.append(done)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(encode, "_BATCH_BYTES", 2000)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), "byte", out, shard_tokens=1000, progress=interrupt)
    assert (out / "train_000000.bin").exists() and not (out / "manifest.json").exists()
    with pytest.raises(ValueError, match="has not finished"):
        DataFolder.open(out)
    manifest = prepare(str(source), "byte", out)  # other parameters: larger shards
    assert manifest == prepare(str(source), "byte", tmp_path / "fresh")
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "fresh").iterdir())


@pytest.mark.parametrize(
    ("texts", "options", "sentence"),
    [
        ([], {}, "no document"),
        ([" ", "\n"], {}, "no document"),
        (["one"], {}, "a single document"),
        (["one"], {"tokenizer": "train:512"}, "a single document"),
        (TEXTS[:3], {"val_fraction": 1e-9}, "raise --val-fraction"),
        (TEXTS[:3], {"val_docs": 3}, "none is left to train on"),
        (TEXTS, {"val_docs": 0}, "--val-docs must be at least 1"),
        (TEXTS, {"val_fraction": 1.0}, "between 0 and 1"),
        (TEXTS, {"limit_docs": -1}, "--limit-docs"),
        (TEXTS, {"limit_docs": 5, "val_docs": 5}, "leaves nothing"),
        (TEXTS, {"revision": "v1"}, "--revision is for"),
        (TEXTS, {"tokenizer": "train:12"}, "train:12"),
        (TEXTS, {"tokenizer": "train:70000"}, "train:70000"),
        (TEXTS, {"tokenizer": "absent.model"}, "absent.model"),
        (TEXTS[:5], {"tokenizer": "train:4096"}, "too little"),
        (TEXTS, {"field": "body"}, "source.jsonl:1: no field 'body'"),
        (
            [text.replace(" ", "    ") for text in TEXTS],
            {"tokenizer": "train:300"},
            "of the text .*the normaliser|the normaliser .*of the text",
        ),
    ],
)
def test_refusals(tmp_path: Path, texts: list[str], options: dict, sentence: str) -> None:
    source = jsonl(tmp_path / "source.jsonl", texts)
    with pytest.raises(ValueError, match=sentence):
        prepare(str(source), **{"tokenizer": "byte", "out": tmp_path / "out", **options})
    assert not (tmp_path / "out/manifest.json").exists()


def test_folders_that_are_not_for_data(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is a file"):
        prepare(str(source), "byte", source)
    with pytest.raises(ValueError, match="lies inside --out"):
        prepare(str(source), "byte", tmp_path)
    assert source.exists()
    out = tmp_path / "out"
    out.mkdir()
    with open(out / ".preparing.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process"):
            prepare(str(source), "byte", out)
    (out / ".preparing.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        prepare(str(source), "byte", out)
    usage = prepare_module.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="MB are free"):
        prepare(str(source), "byte", tmp_path / "other")


def test_files_of_the_user_are_never_deleted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def interrupt(*row: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), "byte", out, shard_tokens=1000, progress=interrupt)
    assert (out / ".preparing.json").exists() and not (out / ".preparing.lock").exists()
    mine = jsonl(out / "mine.jsonl", TEXTS)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    model = str(tmp_path / "out/../out/tokenizer.model")
    for arguments in ({"source": str(mine)}, {"val_source": str(out)}, {"tokenizer": model}):
        with pytest.raises(ValueError, match="lies inside --out"):
            prepare(**{"source": str(source), "tokenizer": "byte", "out": out, **arguments})
    with pytest.raises(ValueError, match="is not empty .it holds mine.jsonl."):
        prepare(str(source), "byte", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    mine.unlink()
    prepare(str(source), "byte", out)


def test_a_refused_call_leaves_nothing(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "one.jsonl", ["one"])
    (tmp_path / "mine").mkdir()
    for tokenizer in ("byte", "train:512"):
        for name in ("new", "mine"):
            with pytest.raises(ValueError, match="a single document"):
                prepare(str(source), tokenizer, tmp_path / name)
    assert not (tmp_path / "new").exists() and not list((tmp_path / "mine").iterdir())


def test_the_command(source: Path, tmp_path: Path) -> None:
    def call(*words: str) -> str:
        result = CliRunner().invoke(
            app,
            ["prepare", "--source", str(source), "--out", str(tmp_path / "out"), "--tokenizer", "byte", *words],
            catch_exceptions=False,
        )
        assert result.exit_code == 0
        return result.stdout

    first = call()
    assert "written" in first and "260 pieces" in first and "bytes per" in first
    assert "already there" in call()
    assert json.loads(call("--json")) == DataFolder.open(tmp_path / "out").manifest
    with pytest.raises(ValueError, match="other data"):
        call("--val-docs", "3")


def test_the_official_tokenizer_on_fineweb(shared_dir: Path, tmp_path: Path) -> None:
    """The known counts of the 200 FineWeb documents: 628,257 tokens and a BOS each, 97 of 1,489,515 bytes lost."""
    data = shared_dir / "data/fineweb"
    manifest = prepare(
        str(data / "docs_200.jsonl"), str(data / "fineweb_1024_bpe.model"), tmp_path / "out", val_docs=20
    )
    parts = manifest["splits"].values()
    assert sum(part["num_tokens"] for part in parts) == 628_457
    assert sum(part["num_bytes"] for part in parts) == 1_489_515
    assert sum(part["counted_bytes"] for part in parts) == 1_489_418
    for split in ("train", "val"):
        DataFolder.open(tmp_path / "out").verify(split)


# -- a source of its own for val ---------------------------------------------------------------------------------------


def test_val_source_is_all_of_val_and_source_is_all_of_train(source: Path, tmp_path: Path) -> None:
    val = jsonl(tmp_path / "held_out.jsonl", ["held out 1", TEXTS[3], "held out 2", "held out 1"])
    manifest = prepare(str(source), "byte", tmp_path / "out", val_source=str(val))
    assert documents(tmp_path / "out", "val") == ["held out 1", TEXTS[3], "held out 2"]
    assert documents(tmp_path / "out", "train") == TEXTS[:3] + TEXTS[4:]
    assert manifest["num_duplicates_dropped"] == 2
    parameters = manifest["parameters"]
    assert parameters["val"] == "all of held_out.jsonl" and parameters["val_fingerprint"] != parameters["fingerprint"]
    assert str(tmp_path) not in json.dumps(manifest)
    assert prepare(str(source), "byte", tmp_path / "out", val_source=str(val)) == manifest
    for options, what in (({}, "val: there 'all of held_out.jsonl', asked 0.05"), ({"val_source": str(source)}, "val_fingerprint")):
        with pytest.raises(ValueError, match=f"already holds other data .*{what}"):
            prepare(str(source), "byte", tmp_path / "out", **options)
    jsonl(val, ["changed"])
    with pytest.raises(ValueError, match="val_fingerprint"):
        prepare(str(source), "byte", tmp_path / "out", val_source=str(val))


def test_val_source_works_with_one_file_each_and_limits_only_train(source: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text(f"The only document of {name}.")
    manifest = prepare(str(tmp_path / "train.txt"), "byte", tmp_path / "out", val_source=str(tmp_path / "val.txt"))
    assert [manifest["splits"][split]["num_documents"] for split in ("train", "val")] == [1, 1]
    assert documents(tmp_path / "out", "train") == ["The only document of train."]
    val = jsonl(tmp_path / "val.jsonl", ["one", "two", "three"])
    manifest = prepare(str(source), "byte", tmp_path / "limited", val_source=str(val), limit_docs=2)
    assert [manifest["splits"][split]["num_documents"] for split in ("train", "val")] == [2, 3]


def test_a_tokenizer_is_not_trained_on_val_source(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = prepare_module.train_sentencepiece
    monkeypatch.setattr(prepare_module, "train_sentencepiece",
                        lambda texts, size, out: real((seen.append(text) or text for text in texts), size, out))
    val = jsonl(tmp_path / "val.jsonl", ["held out", TEXTS[0]])
    prepare(str(source), "train:300", tmp_path / "out", val_source=str(val))
    assert seen == TEXTS[1:] == documents(tmp_path / "out", "train")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".model"] == ["tokenizer.model"]
    DataFolder.open(tmp_path / "out").verify("val")


@pytest.mark.parametrize("options, sentence", [
    ({"val_docs": 3}, "neither --val-fraction nor --val-docs"), ({"val_fraction": 0.05}, "neither --val-fraction nor --val-docs"),
    ({"val_source": "fineweb"}, "names text on this machine"), ({"val_source": "absent.txt"}, "no such file"),
    ({"source": "challenge", "tokenizer": "sp1024"}, "split already"),
    ({"source": "{val}"}, "no document to train on"), ({"val_source": "{blank}"}, "--val-source holds no document"),
])
def test_refusals_of_val_source(source: Path, tmp_path: Path, options: dict, sentence: str) -> None:
    names = {"{val}": str(jsonl(tmp_path / "val.jsonl", TEXTS[:4])), "{blank}": str(jsonl(tmp_path / "blank.jsonl", [" "]))}
    options = {key: names.get(value, value) for key, value in options.items()}
    arguments = {"source": str(source), "tokenizer": "byte", "val_source": names["{val}"], **options}
    with pytest.raises(ValueError, match=sentence):
        prepare(out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_folder_holds_one_tokenizer_however_it_came(source: Path, tmp_path: Path) -> None:
    first = prepare(str(source), "train:300", tmp_path / "first")
    copied = shutil.copy(tmp_path / "first/tokenizer.model", tmp_path / "trained_300.model")
    second = prepare(str(source), str(copied), tmp_path / "second")
    assert second["tokenizer"] == first["tokenizer"]
    for name in ("first", "second"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            "manifest.json", "tokenizer.model", "train_000000.bin", "val_000000.bin"]
        assert load_tokenizer(tmp_path / name).sha256 == first["tokenizer"]["sha256"]
