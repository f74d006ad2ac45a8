"""The start-up self-test of an engine: the decode step must compute what the whole forward computes, and a captured step must follow every
change of the weights. Both can fail without any error, with plausible text as the only symptom.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bitsperbyte.randopt.engines.decode import Decoder

PROMPT_LENGTHS = (5, 17, 2)
NUM_TOKENS = 4
SEEDS = (1, 2)
# relative errors of logits: between two ways to compute one network (H200: .02 for 24 random bf16 layers), and of a graph against the same
# kernels launched one by one, which differ where the library picks another matrix product
STEP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
GRAPH_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 5e-3}


def sample_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def step_error(decoder: Decoder, forward: Callable[[list[int]], Tensor], vocab_size: int) -> float:
    """Relative error of the decode step's logits, launched one by one, against `forward`, which gives logits (L, V) of a whole
    sequence of L ids."""
    prompts = sample_prompts(vocab_size)
    tokens, logits = decoder.trace(prompts, NUM_TOKENS, graphs=False)
    return worst(
        [relative_error(logits[i], forward(prompt + tokens[i, :-1].tolist())[-NUM_TOKENS:].float()) for i, prompt in enumerate(prompts)])


def check_graphs(decoder: Decoder, perturb: Callable[[int], None], vocab_size: int, dtype: torch.dtype) -> float:
    """Compare captured logits with eager ones under two seeds: `perturb` switches the weights to a seed's, and the graph is captured
    under neither of them alone. Returns the largest relative error; RuntimeError where a graph's logits are not the current weights', or
    where the seeds make no difference."""
    prompts = sample_prompts(vocab_size)
    eager, captured = [], []
    for seed in SEEDS:
        perturb(seed)
        captured.append(decoder.trace(prompts, 1, graphs=True)[1])
        eager.append(decoder.trace(prompts, 1, graphs=False)[1])
    moved = relative_error(eager[1], eager[0])
    if not moved > 0.0:
        raise RuntimeError(f"self-test: seeds {SEEDS[0]} and {SEEDS[1]} give equal logits, so the noise does not reach the weights that the "
                           "model computes with: a larger sigma, or other patterns in noise.include, may be needed")
    error = worst([relative_error(a, b) for a, b in zip(captured, eager, strict=True)])
    if not error <= min(GRAPH_TOLERANCE[dtype], max(0.5 * moved, 1e-6)):
        raise RuntimeError(f"self-test: logits of the captured decode step differ from eager ones by {error:.2g} (relative) after a switch "
                           f"of the weights, which moves them by {moved:.2g}: the graph does not compute with the current weights; set "
                           "decode.graphs to off, and report this")
    return error


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; not a number where either holds one."""
    return ((found - expected).norm() / expected.norm()).item()


def worst(errors: list[float]) -> float:
    """The largest; not a number if any is none, which Python's max would lose unless it comes first."""
    return torch.tensor(errors, dtype=torch.float64).max().item()
