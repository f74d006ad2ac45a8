"""The torch operations of a layer against their definitions in float64, one element at a time."""

import math

import pytest
import torch

from bitsperbyte.randopt.engines import layer_ops

WIDTH, NUM_Q, NUM_KV, NUM_ROWS, NUM_POSITIONS = 6, 4, 2, 5, 9


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("shifted", [False, True])
def test_norm_divides_by_the_root_mean_square(shifted: bool) -> None:
    x, y, weight = normal(3, 8), normal(3, 8, seed=1), normal(8)
    scale = 1.0 + weight.double() if shifted else weight.double()

    def expected(v: torch.Tensor) -> torch.Tensor:
        return v.double() / (v.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale

    assert torch.allclose(layer_ops.norm(x, weight, 1e-3, shifted).double(), expected(x), atol=1e-6)
    total = x + y
    assert torch.allclose(layer_ops.add_norm(x, y, weight, 1e-3, shifted).double(), expected(total), atol=1e-6)
    assert torch.equal(x, total), "the sum stays in x"


def test_keys_and_values_land_at_their_row_and_position() -> None:
    qkv = normal(3, (NUM_Q + 2 * NUM_KV) * WIDTH)
    angles = torch.rand(NUM_POSITIONS, WIDTH // 2, generator=torch.Generator().manual_seed(1))
    keys, values = torch.zeros(2, NUM_ROWS, NUM_KV, NUM_POSITIONS, WIDTH)
    rows, positions = torch.tensor([4, 0, 2]), torch.tensor([8, 3, 0])
    original = qkv.clone()
    q = layer_ops.rotate_and_store(qkv, angles.cos(), angles.sin(), rows, positions, keys, values, None, None, 1e-6)
    heads = original.view(3, -1, WIDTH).double()
    for t, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        # a rotation of the plane of dimensions d and d + WIDTH / 2 by the position's angle: a product of complex numbers
        turn = torch.polar(torch.ones(WIDTH // 2, dtype=torch.float64), angles[position].double())
        turned = torch.complex(heads[t, :, : WIDTH // 2], heads[t, :, WIDTH // 2 :]) * turn
        turned = torch.cat([turned.real, turned.imag], -1)
        assert torch.allclose(q[t].double(), turned[:NUM_Q], atol=1e-6)
        assert torch.allclose(keys[row, :, position].double(), turned[NUM_Q : NUM_Q + NUM_KV], atol=1e-6)
        assert torch.allclose(values[row, :, position].double(), heads[t, NUM_Q + NUM_KV :], atol=1e-6)
    assert keys.count_nonzero() == values.count_nonzero() == 3 * NUM_KV * WIDTH, "nothing else is written"


def test_heads_are_normed_before_they_turn() -> None:
    qkv, q_norm, k_norm = normal(1, (NUM_Q + 2 * NUM_KV) * WIDTH), normal(WIDTH), normal(WIDTH, seed=1)
    keys, values = torch.zeros(2, 1, NUM_KV, NUM_POSITIONS, WIDTH)
    heads = qkv.view(-1, WIDTH).clone()
    still = torch.ones(NUM_POSITIONS, WIDTH // 2), torch.zeros(NUM_POSITIONS, WIDTH // 2)
    zero = torch.zeros(1, dtype=torch.int64)
    q = layer_ops.rotate_and_store(qkv, *still, zero, zero, keys, values, q_norm, k_norm, 1e-6)
    assert torch.allclose(q[0], layer_ops.norm(heads[:NUM_Q], q_norm, 1e-6, False), atol=1e-6)
    assert torch.allclose(keys[0, :, 0], layer_ops.norm(heads[NUM_Q : NUM_Q + NUM_KV], k_norm, 1e-6, False), atol=1e-6)
    assert torch.equal(values[0, :, 0], heads[NUM_Q + NUM_KV :])


def test_activations() -> None:
    both = normal(2, 14)
    gate, up = both.double().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = {"silu": gate / (1 + (-gate).exp()), "gelu": gate / 2 * (1 + torch.erf(gate / math.sqrt(2))),
                "gelu_tanh": gate / 2 * (1 + inner.tanh())}
    assert set(expected) == set(layer_ops.ACTIVATIONS)
    for name, activated in expected.items():
        assert torch.allclose(layer_ops.gated(both, name).double(), activated * up, atol=1e-6)


def test_attention_sees_its_row_up_to_its_length() -> None:
    q = normal(3, NUM_Q, WIDTH)
    keys, values = normal(NUM_ROWS, NUM_KV, NUM_POSITIONS, WIDTH), normal(NUM_ROWS, NUM_KV, NUM_POSITIONS, WIDTH, seed=1)
    lengths, longest = torch.tensor([0, 6, 3]), 7
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length + 1 :] = 1e30  # whatever lies behind a row's end must not matter
        values[row, :, length + 1 :] = 1e30
    found = layer_ops.attend(q, keys, values, lengths, longest, 0.3).view(3, NUM_Q, WIDTH)
    for row, length in enumerate(lengths.tolist()):
        for head in range(NUM_Q):
            kv = head // (NUM_Q // NUM_KV)
            weights = (keys[row, kv, : length + 1].double() @ q[row, head].double() * 0.3).softmax(0)
            assert torch.allclose(found[row, head].double(), weights @ values[row, kv, : length + 1].double(), atol=1e-6)
