"""Figures of the challenge's official data that any right implementation must give."""

import json
import math

import numpy as np
import pytest

from bitsperbyte.metric.bpb import Score
from bitsperbyte.metric.windows import plan_windows
from bitsperbyte.text.tokenizers import SentencePieceTokenizer, load_tokenizer, prove


@pytest.fixture(scope="module")
def official(shared_dir) -> SentencePieceTokenizer:
    return load_tokenizer(shared_dir / "data" / "fineweb" / "fineweb_1024_bpe.model")


@pytest.fixture(scope="module")
def tokens(shared_dir) -> np.ndarray:
    return np.load(shared_dir / "data" / "fineweb" / "val_tokens_first_131072.npy", allow_pickle=False)


@pytest.fixture(scope="module")
def documents(shared_dir) -> list[str]:
    with open(shared_dir / "data" / "fineweb" / "docs_200.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def test_official_tokenizer(official):
    assert (official.vocab_size, official.bos_id, official.name) == (1024, 1, "sp1024")
    assert official.table.is_boundary.nonzero()[0].tolist() == [0, 1, 2, 3]
    assert (official.table.base_bytes[939], official.table.starts_with_space[939]) == (0, True)


def test_bytes_of_the_validation_tokens(official, tokens):
    counted = official.table.target_bytes(tokens[:-1], tokens[1:])
    assert counted.dtype == np.int64 and counted.shape == (131_071,)
    assert int(counted.sum()) == 315_257
    assert int((tokens[1:] == official.bos_id).sum()) == 108
    assert int(counted[tokens[1:] == official.bos_id].sum()) == 0


@pytest.mark.parametrize(("length", "stride"), [(1024, None), (1024, 64), (1000, 333), (200_000, None)])
def test_a_uniform_model_scores_the_same_under_all_windows(official, tokens, length, stride):
    plan = plan_windows(tokens, length=length, stride=stride)
    score = Score.zero()
    for window in plan:
        target = tokens[window.first : window.end + 1]
        counted = official.table.target_bytes(tokens[window.first - 1 : window.end], target)
        score += Score(len(target) * math.log(1024), counted.sum(), len(target))
    assert (score.num_tokens, score.num_bytes) == (131_071, 315_257)
    assert score.check().bytes_per_token == pytest.approx(2.405238, abs=5e-7)
    assert score.bpb == pytest.approx(4.157592, abs=5e-7)


def test_isolated_documents_drop_the_bos_targets_and_no_bytes(official, tokens):
    plan = plan_windows(tokens, length=1024, documents="isolated", bos_id=official.bos_id)
    at = np.concatenate([np.arange(w.first, w.end + 1) for w in plan])
    assert len(at) == plan.num_scored == 131_071 - 108
    assert int(official.table.target_bytes(tokens[at - 1], tokens[at]).sum()) == 315_257


def test_the_token_two_before_the_target_gives_another_count(official, tokens):
    """The off-by-one that a public trainer has: the count must notice it."""
    shifted = official.table.target_bytes(tokens[:-2], tokens[2:])
    right = official.table.target_bytes(tokens[1:-1], tokens[2:])
    assert int(shifted.sum()) != int(right.sum())


@pytest.mark.parametrize(("model", "num_tokens"), [("fineweb_1024_bpe", 628_257), ("fineweb_8192_bpe", 420_773)])
def test_official_models_on_200_documents(shared_dir, documents, model, num_tokens):
    tokenizer = load_tokenizer(shared_dir / "data" / "fineweb" / f"{model}.model")
    proof = prove(tokenizer, documents)
    assert (proof.num_documents, proof.raw_bytes, proof.counted_bytes) == (200, 1_489_515, 1_489_418)
    assert (proof.num_resized_documents, proof.net_bytes) == (33, 97)
    assert proof.lost_bytes == 199 and proof.lost_share == 199 / 1_489_515
    assert sum(len(ids) for ids in tokenizer.encode_batch(documents)) == num_tokens
