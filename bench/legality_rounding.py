"""How far does rounding alone change a log-probability? One row a model and precision: what golf/legality.py's tolerances must exceed.

    PYTHONPATH=src python bench/legality_rounding.py [--artifact runs/demo/artifact.bpb] [--texts 20] [--device cpu]

Measures with the legality check's own comparison (batch_changes): each text is scored alone, beside others, in other places, and with every
window by itself. Printed in nats: the largest change at equal shapes where other texts stand beside it (`same`), the largest change of any
entry of a distribution in another batch (`reshaped`), and the largest mean change over the targets of one text (`mean`). Weights are
random, with logits that spread as stated, or those of an artifact. A row whose changes are all 0 has not met another path of the
matrix product and says nothing; the bench ends with an error if all rows of a precision are so.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from bitsperbyte.golf.artifact import read_artifact
from bitsperbyte.golf.evaluate import Protocol
from bitsperbyte.golf.legality import TOLERANCES, batch_changes
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.probes import Text, made_up_tokens
from bitsperbyte.golf.scorers import NetworkScorer

SMALL = {"vocab_size": 256, "dim": 128, "num_heads": 4, "num_kv_heads": 2}
V7 = {"order": (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0), "skips": tuple((j, 11 - j) for j in range(6))}
MODELS = {"baseline, narrow": {"order": tuple(range(9)), "skips": ((3, 4), (2, 5), (1, 6), (0, 7))}, "recurrent_v7, narrow": V7,
          "recurrent_v7, narrow, attention window 16": {**V7, "attention_window": 16}}


def network(changes: dict, seed: int, spread: float) -> GolfModel:
    torch.manual_seed(seed)
    model = GolfModel(ModelConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(spread * torch.randn_like(p))
    return model


def measure(model: GolfModel, num_texts: int, num_tokens: int, seed: int) -> np.ndarray:
    """(same, reshaped, mean) in nats, the largest over texts."""
    vocab = model.config.vocab_size
    text = Text(made_up_tokens(vocab, seed=seed), vocab, None, keep_bos=False, seed=seed)
    worst = np.zeros(3)
    for number in range(num_texts):
        scorer = NetworkScorer(model, Protocol(max(8, num_tokens * 2 // 5), None if number % 2 else max(2, num_tokens // 8)))
        exact, loose, mean = batch_changes(scorer, text, num_tokens)
        worst = np.maximum(worst, (exact.worst, loose.worst, mean))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, action="append", default=[], help="measure this one too")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, action="append", help="of a text; default 160, as the check takes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=list(TOLERANCES), action="append", help="default: both")
    args = parser.parse_args()
    made = {f"{name}, spread {spread}": [network(changes, seed, spread) for seed in range(args.first_seed, args.first_seed + args.seeds)]
            for name, changes in MODELS.items() for spread in (0.05, 0.3)}
    for path in args.artifact:
        artifact = read_artifact(path)
        model = GolfModel(artifact.model)
        model.load_state_dict(artifact.state)
        made[str(path)] = [model]
    print(f"torch {torch.__version__}, {args.device}, {args.texts} texts\n{'same':>10} {'reshaped':>10} {'mean':>10}  precision, tokens, model")
    for precision in args.precision or TOLERANCES:
        dtype = getattr(torch, precision)
        largest = 0.0
        for name, models in made.items():
            for num_tokens in args.tokens or (160,):
                worst = np.zeros(3)
                for seed, model in enumerate(models, args.first_seed):
                    model.place(torch.device(args.device))
                    model.compute_dtype = dtype
                    worst = np.maximum(worst, measure(model, args.texts, num_tokens, seed))
                largest = max(largest, worst[1])
                print(*(f"{value:10.2g}" for value in worst), f" {precision}, {num_tokens}, {name}", flush=True)
        if largest == 0:
            raise SystemExit(f"{precision}: no batch changed anything, so nothing was measured")
        limits = TOLERANCES[precision]
        print(*(f"{value:10.2g}" for value in (limits.same, limits.reshaped, limits.mean)), f" {precision}, the tolerance")


if __name__ == "__main__":
    main()
