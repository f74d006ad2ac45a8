"""The network: published parameter counts, what each position may see, and a second implementation of it."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitsperbyte.golf.model import GolfModel, ModelConfig, is_control, parameter_counts, state_shapes


def recurrent(num_unique: int, **kwargs) -> ModelConfig:
    """U blocks up and down again, every block's first output added before its second use."""
    order = (*range(num_unique), *reversed(range(num_unique)))
    skips = tuple((j, 2 * num_unique - 1 - j) for j in reversed(range(num_unique)))
    return ModelConfig(order=order, skips=skips, **kwargs)


SMALL = {"vocab_size": 50, "dim": 24, "num_heads": 4, "num_kv_heads": 2}
BASELINE_LIKE = ModelConfig(**SMALL, order=(0, 1, 2, 3, 4), skips=((1, 2), (0, 3)))
RECURRENT = recurrent(3, **SMALL)
UNTIED = ModelConfig(**SMALL, order=(0, 1, 0), skips=(), tie_embeddings=False, mlp_mult=3)
ONE_LAYER = ModelConfig(**SMALL, order=(0,), skips=())


def perturbed(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> GolfModel:
    """A model whose every tensor is random: the zero-initialised projections would hide the rest of the network.

    In float64, so that equality can be asked for tightly.
    """
    torch.manual_seed(seed)
    model = GolfModel(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if is_control(name) else 0.25))
    model.compute_dtype = dtype
    return model.to(dtype)


def tokens(batch: int, length: int, seed: int = 1, vocab: int = 50) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: GolfModel, tokens_BT: Tensor) -> Tensor:
    hidden = model.hidden(tokens_BT)
    return model.logits(hidden.flatten(0, 1)).view(*tokens_BT.shape, -1)


# -- parameter counts ------------------------------------------------------------------------------------------------

PUBLISHED = [
    (ModelConfig(), 17_059_912),
    (recurrent(4, dim=768), 17_316_896),
    (recurrent(4, dim=512), 7_874_592),
    (recurrent(6, dim=576), 14_541_744),
]


@pytest.mark.parametrize("config, total", PUBLISHED)
def test_published_parameter_counts(config: ModelConfig, total: int) -> None:
    counts = parameter_counts(config)
    assert counts["total"] == total == sum(n for part, n in counts.items() if part != "total")
    with torch.device("meta"):
        model = GolfModel(config)
    assert sum(p.numel() for p in model.parameters()) == total
    assert counts["embedding"] == 1024 * config.dim and counts["skips"] == len(config.skips) * config.dim


@pytest.mark.parametrize("config", [ModelConfig(), BASELINE_LIKE, RECURRENT, UNTIED, ONE_LAYER])
def test_state_shapes_are_those_of_the_module_in_its_order(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = GolfModel(config)
    built = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert built == list(state_shapes(config).items())
    assert [name for name, _ in built] == list(model.state_dict())


# -- an independent forward pass -------------------------------------------------------------------------------------


def rms(x: list[float]) -> list[float]:
    # the epsilon of torch's parameter-free norm is the dtype's own
    scale = math.sqrt(sum(v * v for v in x) / len(x) + torch.finfo(torch.float64).eps)
    return [v / scale for v in x]


def matvec(W: list[list[float]], x: list[float]) -> list[float]:
    return [sum(w * v for w, v in zip(row, x, strict=True)) for row in W]


def rotate(x: list[float], position: int, base: float) -> list[float]:
    """Pairs (i, i + half) turned by position * base^(-i / half)."""
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        # the module computes its table of angles in float32
        angle = (torch.tensor(float(position)) * base ** (-torch.tensor(2.0 * i) / len(x))).item()
        cos, sin = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = x[i] * cos + x[i + half] * sin, x[i + half] * cos - x[i] * sin
    return out


def naive_attention(W: dict, block: str, xs: list[list[float]], c: ModelConfig) -> list[list[float]]:
    width, shared = c.dim // c.num_heads, c.num_heads // c.num_kv_heads

    def heads(name: str, x: list[float], num: int) -> list[list[float]]:
        flat = matvec(W[f"{block}.attn.{name}.weight"], x)
        return [flat[h * width : (h + 1) * width] for h in range(num)]

    queries = [
        [
            [W[f"{block}.attn.q_gain"][h] * v for v in rotate(rms(q), t, c.rope_base)]
            for h, q in enumerate(heads("c_q", x, c.num_heads))
        ]
        for t, x in enumerate(xs)
    ]
    keys = [[rotate(rms(k), t, c.rope_base) for k in heads("c_k", x, c.num_kv_heads)] for t, x in enumerate(xs)]
    values = [heads("c_v", x, c.num_kv_heads) for x in xs]
    out = []
    for t in range(len(xs)):
        joined: list[float] = []
        for h in range(c.num_heads):
            first = 0 if c.attention_window is None else max(0, t - c.attention_window + 1)
            scores = [
                sum(a * b for a, b in zip(queries[t][h], keys[s][h // shared], strict=True)) / math.sqrt(width)
                for s in range(first, t + 1)
            ]
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            joined += [
                sum(w * values[first + i][h // shared][e] for i, w in enumerate(weights)) / sum(weights)
                for e in range(width)
            ]
        out.append(matvec(W[f"{block}.attn.proj.weight"], joined))
    return out


def naive_logits(model: GolfModel, ids: list[int], c: ModelConfig) -> list[list[float]]:
    """One sequence in plain Python floats.

    The U-Net is written as its authors describe it: the first half of the order pushes its outputs on a stack; each
    later position pops one while any is left, adds it times the next row of skip weights, and runs.
    """
    W = {name: p.tolist() for name, p in model.named_parameters()}
    xs = [rms(W["tok_emb.weight"][i]) for i in ids]
    x0s = [list(x) for x in xs]

    def run(block: int, xs: list[list[float]]) -> list[list[float]]:
        b = f"blocks.{block}"
        mix, attn_scale, mlp_scale = W[f"{b}.resid_mix"], W[f"{b}.attn_scale"], W[f"{b}.mlp_scale"]
        xs = [
            [m0 * v + m1 * v0 for m0, m1, v, v0 in zip(*mix, x, x0, strict=True)] for x, x0 in zip(xs, x0s, strict=True)
        ]
        ys = naive_attention(W, b, [rms(x) for x in xs], c)
        xs = [[v + s * a for v, s, a in zip(x, attn_scale, y, strict=True)] for x, y in zip(xs, ys, strict=True)]
        out = []
        for x in xs:
            hidden = [max(h, 0.0) ** 2 for h in matvec(W[f"{b}.mlp.fc.weight"], rms(x))]
            y = matvec(W[f"{b}.mlp.proj.weight"], hidden)
            out.append([v + s * a for v, s, a in zip(x, mlp_scale, y, strict=True)])
        return out

    num_encoder = len(c.order) // 2 if c.skips else 0
    stack: list[list[list[float]]] = []
    for block in c.order[:num_encoder]:
        xs = run(block, xs)
        stack.append(xs)
    for row, block in enumerate(c.order[num_encoder:]):
        if stack:
            weights = W["skip_weights"][row]
            xs = [
                [v + w * s for v, w, s in zip(x, weights, skip, strict=True)]
                for x, skip in zip(xs, stack.pop(), strict=True)
            ]
        xs = run(block, xs)
    head = W["tok_emb.weight"] if c.tie_embeddings else W["lm_head.weight"]
    return [[c.logit_softcap * math.tanh(v / c.logit_softcap) for v in matvec(head, rms(x))] for x in xs]


WINDOWED = recurrent(2, **SMALL, attention_window=3)


@pytest.mark.parametrize("config", [BASELINE_LIKE, RECURRENT, UNTIED, ONE_LAYER, WINDOWED])
def test_equals_a_second_implementation(config: ModelConfig) -> None:
    model = perturbed(config)
    ids = tokens(1, 7)
    expected = torch.tensor(naive_logits(model, ids[0].tolist(), config))
    with torch.no_grad():
        actual = logits_of(model, ids)[0]
    assert expected.std() > 0.1
    # attention rounds queries and keys, the logits their result to float32
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=3e-5)


# -- what a position may see -----------------------------------------------------------------------------------------


@given(position=st.integers(0, 10), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_a_later_token_changes_no_earlier_logit(position: int, seed: int) -> None:
    for config in (BASELINE_LIKE, RECURRENT, WINDOWED):
        model = perturbed(config)
        before = tokens(1, 12, seed)
        after = before.clone()
        after[0, position + 1] = (after[0, position + 1] + 1) % 50
        with torch.no_grad():
            a, b = logits_of(model, before)[0], logits_of(model, after)[0]
        assert torch.equal(a[: position + 1], b[: position + 1])
        assert not torch.equal(a[position + 1], b[position + 1])


@pytest.mark.parametrize("window", [12, 13, 500])
def test_a_window_as_long_as_the_sequence_is_full_attention(window: int) -> None:
    config = recurrent(3, **SMALL, attention_window=window)
    ids = tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(logits_of(perturbed(config), ids), logits_of(perturbed(RECURRENT), ids))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_window_limits_one_layer_to_that_many_tokens(window: int) -> None:
    model = perturbed(ModelConfig(**SMALL, order=(0,), skips=(), attention_window=window))
    ids = tokens(1, 12)
    changed = ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 50
    with torch.no_grad():
        differs = (logits_of(model, ids) != logits_of(model, changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(4, min(4 + window, 12)))


def test_a_windowed_mask_serves_each_length() -> None:
    """Masks are kept for reuse: another length must not get the first one's."""
    model = perturbed(WINDOWED)
    ids = tokens(1, 12)
    with torch.no_grad():
        full = logits_of(model, ids)
        for length in (5, 2, 12):
            torch.testing.assert_close(logits_of(model, ids[:, :length]), full[:, :length], rtol=0, atol=1e-5)


def test_sequences_of_a_batch_do_not_meet() -> None:
    model = perturbed(RECURRENT)
    ids = tokens(3, 12)
    with torch.no_grad():
        together = logits_of(model, ids)
        for i in range(3):
            torch.testing.assert_close(together[i : i + 1], logits_of(model, ids[i : i + 1]), rtol=0, atol=1e-5)


# -- loss, initial values, gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [RECURRENT, UNTIED])
def test_loss_is_the_mean_negative_log_probability(config: ModelConfig) -> None:
    model = perturbed(config)
    ids = tokens(2, 9)
    with torch.no_grad():
        log_p = logits_of(model, ids[:, :-1]).double().log_softmax(-1)
        expected = -sum(log_p[b, t, ids[b, t + 1]] for b, t in itertools.product(range(2), range(8))) / 16
        loss = model.loss(ids[:, :-1], ids[:, 1:])
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_logits_are_float32_and_capped() -> None:
    model = perturbed(ModelConfig(**SMALL, order=(0,), skips=(), logit_softcap=2.0), dtype=torch.float32)
    with torch.no_grad():
        model.tok_emb.weight.mul_(100)
        logits = logits_of(model, tokens(2, 9))
    assert logits.dtype == torch.float32 and 1.9 < logits.abs().max() <= 2.0


def test_initial_values() -> None:
    torch.manual_seed(0)
    config = ModelConfig(dim=64, order=(0, 1), skips=((0, 1),))
    state = GolfModel(config).state_dict()
    assert state["tok_emb.weight"].std().item() == pytest.approx(0.005, rel=0.02)
    for name, value in state.items():
        assert value.dtype == torch.float32
        if name.endswith("proj.weight"):
            assert not value.any(), name
        elif name.endswith("q_gain"):
            assert (value == 1.5).all()
        elif name.endswith("resid_mix"):
            assert (value[0] == 1).all() and not value[1].any()
        elif is_control(name):
            assert (value == 1).all(), name
        elif name.startswith("blocks"):
            bound = value.size(1) ** -0.5
            assert value.abs().max() <= bound and value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), (
                name
            )


@pytest.mark.parametrize("config", [BASELINE_LIKE, RECURRENT, UNTIED, WINDOWED])
def test_gradient_reaches_every_entry(config: ModelConfig) -> None:
    model = perturbed(config, dtype=torch.float32)
    ids = tokens(4, 17)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        # a token that does not occur is missing from an untied embedding's gradient, a dead ReLU from fc's
        reached = (p.grad != 0).float().mean()
        assert reached > (0.5 if "tok_emb" in name or ".mlp." in name else 0.95), (name, reached)


def test_a_fresh_model_learns_first_through_the_projections() -> None:
    torch.manual_seed(0)
    model = GolfModel(RECURRENT)
    ids = tokens(4, 17)
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)
    loss.backward()
    for name, p in model.named_parameters():
        if name.endswith("proj.weight"):
            assert p.grad.abs().max() > 0, name


# -- the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [ModelConfig(), RECURRENT, UNTIED, WINDOWED])
def test_config_round_trip(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "change, word",
    [
        ({"colour": 1}, "colour"),
        ({"dim": 513}, "multiple of num_heads"),
        ({"dim": 8, "num_heads": 8}, "even"),
        ({"dim": -8}, "dim must be"),
        ({"dim": 2**40}, "dim must be"),
        ({"dim": True}, "dim must be"),
        ({"dim": 512.0}, "dim must be"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 10**9}, "vocab_size"),
        ({"order": []}, "order"),
        ({"order": [0, 2], "skips": []}, "must use every block"),
        ({"order": [0, -1]}, "block indices"),
        ({"order": "0123"}, "order must be a list"),
        ({"order": [0] * 5000}, "order must list"),
        ({"order": [10**6]}, "block indices"),
        ({"skips": [[4, 3]]}, "earlier to a later"),
        ({"skips": [[0, 9]]}, "earlier to a later"),
        ({"skips": [[0]]}, "earlier to a later"),
        ({"skips": [[0, 5], [1, 5]]}, "same position"),
        ({"skips": [3]}, "pairs"),
        ({"attention_window": 0}, "attention_window"),
        ({"rope_base": float("nan")}, "rope_base"),
        ({"logit_softcap": 0}, "logit_softcap"),
        ({"qk_gain_init": "1"}, "qk_gain_init"),
        ({"tie_embeddings": 1}, "tie_embeddings"),
    ],
)
def test_config_refuses_what_does_not_fit(change: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ModelConfig.from_dict({**ModelConfig().to_dict(), **change})
