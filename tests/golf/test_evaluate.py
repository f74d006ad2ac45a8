"""The scorer against a second one that takes a window at a time, all its logits, and sums in plain Python."""

import math

import numpy as np
import pytest
import torch

from bitsperbyte.golf.evaluate import Evaluation, Protocol, evaluate, position_edges
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.records.schema import PositionPart
from bitsperbyte.text.tokenizers import ByteTable, load_tokenizer

VOCAB, BOS = 40, 1
CONFIG = ModelConfig(vocab_size=VOCAB, dim=16, num_heads=2, num_kv_heads=1, order=(0, 1, 0), skips=((0, 2),))


@pytest.fixture(scope="module")
def model() -> GolfModel:
    torch.manual_seed(0)
    model = GolfModel(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def table() -> ByteTable:
    """Tokens 0..3 are control pieces; every third other one starts with a space."""
    ids = np.arange(VOCAB)
    return ByteTable(np.where(ids < 4, 0, 1 + ids % 4), (ids >= 4) & (ids % 3 == 0), ids < 4)


def stream(*lengths: int, seed: int = 0, begin_with_bos: bool = True) -> np.ndarray:
    """Documents of so many tokens, each behind a BOS."""
    rng = np.random.default_rng(seed)
    parts = [np.concatenate([[BOS], rng.integers(4, VOCAB, n)]) for n in lengths]
    joined = np.concatenate(parts).astype(np.uint16)
    return joined if begin_with_bos else joined[1:]


def brute_force(model: GolfModel, tokens: list[int], table: ByteTable, p: Protocol,
                by_context: dict[int, list[float]] | None = None) -> tuple[list[float], list[int], list[int]]:
    """(nats, bytes, number of scores) of each document, and how often each target was scored, from the definitions alone. `by_context`
    takes the nats of each target under the number of tokens that stood before it in its window."""
    document_of, documents = [], 0
    for token in tokens:
        documents += token == BOS
        document_of.append(documents)
    if p.documents == "across":
        pieces = [(0, len(tokens))]
    else:
        starts = sorted({0, *(i for i, token in enumerate(tokens) if token == BOS)})
        pieces = list(zip(starts, [*starts[1:], len(tokens)], strict=True))
    nats, num_bytes, times = [0.0] * (documents + 1), [0] * (documents + 1), [0] * len(tokens)
    for begin, end in pieces:
        target = begin + 1  # the next target to score
        while target < end:
            if p.stride is None:
                last = min(target + p.window - 1, end - 1)
                if p.drop_tail and last - target + 1 < p.window:
                    break
                first_input = target - 1
            else:
                last = min(begin + p.window if target == begin + 1 else target + p.stride - 1, end - 1)
                first_input = max(begin, last - p.window)
            with torch.no_grad():
                inputs = torch.tensor([tokens[first_input:last]])
                log_p = model.logits(model.hidden(inputs)[0]).double().log_softmax(-1).tolist()
            for at in range(target, last + 1):
                token, before = tokens[at], tokens[at - 1]
                nats[document_of[at]] -= log_p[at - 1 - first_input][token]
                if by_context is not None:
                    by_context.setdefault(len(tokens[first_input:at]), []).append(-log_p[at - 1 - first_input][token])
                num_bytes[document_of[at]] += int(table.base_bytes[token])
                num_bytes[document_of[at]] += int(table.starts_with_space[token] and before >= 4)
                times[at] += 1
            target = last + 1
    return nats, num_bytes, times


def assert_equal(result: Evaluation, expected: tuple[list[float], list[int], list[int]]) -> None:
    nats, num_bytes, times = expected
    np.testing.assert_allclose(result.document_nats, nats, rtol=1e-5, atol=1e-9)
    assert result.document_bytes.tolist() == num_bytes
    assert result.score.num_tokens == sum(times) and result.score.num_bytes == sum(num_bytes)
    assert result.score.nats == pytest.approx(sum(nats), rel=1e-6)


def assert_positions_equal(result: Evaluation, tokens: list[int], table: ByteTable, protocol: Protocol, model: GolfModel) -> None:
    by_context: dict[int, list[float]] = {}
    brute_force(model, tokens, table, protocol, by_context)
    part = PositionPart(**result.by_position.to_dict())
    assert sum(part.num_tokens) == result.score.num_tokens == sum(map(len, by_context.values()))
    for i, edge in enumerate(part.edges):
        end = part.edges[i + 1] if i + 1 < len(part.edges) else 10**9
        expected = [value for context, values in by_context.items() if edge <= context < end for value in values]
        assert part.num_tokens[i] == len(expected)
        assert part.nats_per_token[i] == (pytest.approx(sum(expected) / len(expected), rel=1e-5) if expected else None)


PROTOCOLS = [Protocol(8), Protocol(8, drop_tail=True), Protocol(8, documents="isolated"), Protocol(8, 3), Protocol(8, 1),
             Protocol(8, 8), Protocol(8, 5, "isolated"), Protocol(64, 7), Protocol(64, None, "isolated"), Protocol(1)]
LENGTHS = [(30, 1, 7, 12), (8, 8, 8), (7,), (16,), (0, 5, 0, 9), (23, 40)]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=Protocol.describe)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_brute_force_by_document(model: GolfModel, table: ByteTable, protocol: Protocol, lengths: tuple[int, ...]) -> None:
    for begin_with_bos in (True, False):
        tokens = stream(*lengths, begin_with_bos=begin_with_bos)
        nats, num_bytes, times = brute_force(model, tokens.tolist(), table, protocol)
        if not sum(times):  # everything is a tail
            with pytest.raises(ValueError, match="nothing to score"):
                evaluate(model, tokens, table, BOS, protocol)
            continue
        context_only = tokens == BOS if protocol.documents == "isolated" else np.zeros(len(tokens), bool)
        if not protocol.drop_tail:
            assert times == [0] + [int(not skipped) for skipped in context_only[1:]]
        for batch_tokens in (1, 3 * protocol.window, 10_000):  # one window, three, all
            assert_equal(evaluate(model, tokens, table, BOS, protocol, batch_tokens=batch_tokens), (nats, num_bytes, times))


@pytest.mark.parametrize("protocol", [*PROTOCOLS, Protocol(9), Protocol(2)], ids=Protocol.describe)
def test_loss_by_position_equals_brute_force(model: GolfModel, table: ByteTable, protocol: Protocol) -> None:
    tokens = stream(30, 1, 7, 12)
    assert_positions_equal(evaluate(model, tokens, table, BOS, protocol), tokens.tolist(), table, protocol, model)


@pytest.mark.parametrize(("window", "edges"), [(1, [1]), (2, [1]), (3, [1, 2]), (8, [1, 2, 4]), (9, [1, 2, 4, 8])])
def test_position_bins_double_below_the_window(window: int, edges: list[int]) -> None:
    assert position_edges(window).tolist() == edges


@pytest.mark.parametrize("protocol", [Protocol(9), Protocol(9, 2), Protocol(9, 4, "isolated")], ids=Protocol.describe)
def test_logits_are_made_for_scored_positions_only(protocol: Protocol, table: ByteTable) -> None:
    torch.manual_seed(0)
    model, rows = GolfModel(CONFIG), []
    logits = model.logits
    model.logits = lambda x: rows.append(len(x)) or logits(x)
    result = evaluate(model, stream(50, 3, 17), table, BOS, protocol, batch_tokens=30)
    assert sum(rows) == result.score.num_tokens == (70 if protocol.documents == "isolated" else 72)


def test_a_large_batch_goes_through_the_head_in_parts(model: GolfModel, table: ByteTable, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = stream(50, 3, 17)
    whole = evaluate(model, tokens, table, BOS, Protocol(9))
    monkeypatch.setattr("bitsperbyte.golf.evaluate.MAX_LOGIT_ROWS", 5)
    np.testing.assert_allclose(evaluate(model, tokens, table, BOS, Protocol(9)).document_nats, whole.document_nats, rtol=1e-6)


@pytest.mark.parametrize("protocol", [Protocol(16, 4, "isolated"), Protocol(16, None, "isolated")], ids=Protocol.describe)
def test_a_document_scores_the_same_in_other_company(model: GolfModel, table: ByteTable, protocol: Protocol) -> None:
    """Isolated documents, whatever they are batched and padded with: alone, among longer ones, among shorter ones."""
    document = stream(21, seed=3)
    alone = evaluate(model, document, table, BOS, protocol)
    for lengths in ((60, 45), (1, 2, 3), (21, 21)):
        others = stream(*lengths, seed=4)
        together = evaluate(model, np.concatenate([others, document, others]), table, BOS, protocol)
        at = len(lengths) + 1
        assert together.document_nats[at] == pytest.approx(alone.document_nats[1], rel=1e-6)
        assert together.document_bytes[at] == alone.document_bytes[1]


def test_padding_is_never_seen(model: GolfModel, table: ByteTable) -> None:
    """A padded window gives what it gives unpadded, though its padding is made of real tokens."""
    short, long = stream(3, seed=5), stream(40, seed=6)
    both = evaluate(model, np.concatenate([long, short]), table, BOS, Protocol(64, None, "isolated"))
    assert both.document_nats[2] == pytest.approx(evaluate(model, short, table, BOS, Protocol(64)).score.nats, rel=1e-6)


def test_a_stride_of_the_whole_window_scores_the_targets_of_non_overlapping_ones(model: GolfModel, table: ByteTable) -> None:
    tokens = stream(31, 2, 30)  # 65 targets: the last window is anchored, so only its score may differ
    sliding, chunks = evaluate(model, tokens, table, BOS, Protocol(8, 8)), evaluate(model, tokens, table, BOS, Protocol(8))
    assert (sliding.score.num_tokens, sliding.score.num_bytes) == (chunks.score.num_tokens, chunks.score.num_bytes) == (
        65, chunks.document_bytes.sum())
    np.testing.assert_allclose(sliding.document_nats[:3], chunks.document_nats[:3], rtol=1e-6)
    tokens = tokens[:65]  # 64 targets: no tail, the same windows
    sliding, chunks = evaluate(model, tokens, table, BOS, Protocol(8, 8)), evaluate(model, tokens, table, BOS, Protocol(8))
    np.testing.assert_allclose(sliding.document_nats, chunks.document_nats, rtol=1e-6)


def test_more_context_changes_the_score(model: GolfModel, table: ByteTable) -> None:
    """The comparisons above would also hold for a model that ignores its context."""
    tokens = stream(60)
    values = {evaluate(model, tokens, table, BOS, p).score.nats for p in (Protocol(8), Protocol(8, 2), Protocol(32))}
    assert len(values) == 3


@pytest.mark.parametrize("protocol", [Protocol(1024), Protocol(1024, 512)], ids=Protocol.describe)
def test_a_uniform_model_on_the_official_tokens(shared_dir, protocol: Protocol) -> None:
    official = load_tokenizer(shared_dir / "data/fineweb/fineweb_1024_bpe.model")
    tokens = np.load(shared_dir / "data/fineweb/val_tokens_first_131072.npy", allow_pickle=False)
    model = GolfModel(ModelConfig(dim=8, num_heads=1, num_kv_heads=1, order=(0,), skips=(), tie_embeddings=False))
    assert not model.lm_head.weight.any()  # a zero head: all logits are equal
    score = evaluate(model, tokens, official.table, official.bos_id, protocol).score
    assert (score.num_tokens, score.num_bytes) == (131_071, 315_257)
    assert score.bpb == pytest.approx(4.157592, abs=5e-7)
    assert score.nats == pytest.approx(131_071 * math.log(1024), rel=1e-7)


def test_progress_ends_at_the_number_of_windows(model: GolfModel, table: ByteTable) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(model, stream(50), table, BOS, Protocol(8), batch_tokens=16, progress=lambda *at: seen.append(at))
    assert seen == [(2, 7), (4, 7), (6, 7), (7, 7)]


def test_what_cannot_be_scored_is_refused(model: GolfModel, table: ByteTable) -> None:
    with pytest.raises(ValueError, match="1 tokens have no target"):
        evaluate(model, stream(0), table, BOS, Protocol(8))
    with pytest.raises(ValueError, match="nothing to score: 0"):
        evaluate(model, np.zeros(0, np.uint16), table, BOS, Protocol(8))
    with pytest.raises(ValueError, match=f"token id {VOCAB} is beyond the model's vocabulary of {VOCAB}"):
        evaluate(model, np.array([BOS, 5, VOCAB], np.uint16), table, BOS, Protocol(8))
    with pytest.raises(ValueError, match="find no target"):
        evaluate(model, np.array([BOS, BOS, BOS], np.uint16), table, BOS, Protocol(8, None, "isolated"))
    for num_bytes in (0, 20):  # per token: outside 0.8..12
        wrong = ByteTable(np.full(VOCAB, num_bytes), np.zeros(VOCAB, bool), table.is_boundary)
        with pytest.raises(ValueError, match="bytes per token|bytes/token|byte"):
            evaluate(model, stream(50), wrong, BOS, Protocol(8))


def test_protocols_say_what_they_are() -> None:
    assert Protocol(1024, 64).describe() == "stride 64 of 1024, across"
    assert Protocol(1024, drop_tail=True).describe() == "non-overlapping 1024, across, tail dropped"
    assert Protocol(8, None, "isolated").describe() == "non-overlapping 8, isolated"
