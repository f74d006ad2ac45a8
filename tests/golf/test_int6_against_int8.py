"""On a trained model, 6 bits with zstd ship fewer bytes than 8 bits with zlib and cost at most 0.02 bits per byte."""

from pathlib import Path

import numpy as np
import pytest

from bitsperbyte.golf.artifact import read_artifact, write_artifact
from bitsperbyte.golf.checkpoint import load_checkpoint
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.evaluate import evaluate
from bitsperbyte.golf.model import GolfModel
from bitsperbyte.golf.session import protocol_of, train
from bitsperbyte.metric.bpb import Score
from bitsperbyte.run.config import load_config
from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.shards import DataFolder, open_shard

# demo_cpu, narrower and shorter: it still ends far below where it starts, with weights that are no longer random
SMALLER = ["model.dim=96", "model.num_heads=3", "model.num_kv_heads=1", "model.order=[0,1,2]", "model.skips=[[0,2]]",
           "schedule.wallclock_s=null", "schedule.max_steps=110", "schedule.warmup_steps=0", "train.batch_tokens=1024",
           "train.micro_batch_tokens=1024", "train.seq_len=64", "train.device=cpu", "eval.every_steps=null",
           "optim.momentum_warmup_steps=50"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, repo_dir: Path) -> tuple[GolfConfig, Path]:
    home = tmp_path_factory.mktemp("int6")
    prepare("embedded", "train:1024", home / "data", limit_docs=500)
    config = load_config(repo_dir / "configs/golf/demo_cpu.yaml", GolfConfig, [*SMALLER, f"data.path={home / 'data'}"])
    train(config, home / "run")
    return config, home


def test_int6_with_zstd_is_smaller_and_costs_little(trained: tuple[GolfConfig, Path], tmp_path: Path) -> None:
    config, home = trained
    data = DataFolder.open(home / "data")
    tokens = np.concatenate([open_shard(shard.path) for shard in data.shards("val")])
    tensors = load_checkpoint(home / "run").tensors
    state = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    model = GolfModel(config.model_dataclass())

    def score() -> Score:
        return evaluate(model, tokens, data.tokenizer.table, data.tokenizer.bos_id, protocol_of(config)).score

    start = score().bpb
    model.load_state_dict(state)
    full = score().bpb
    sizes, scores = {}, {}
    for scheme, codec in (("int8", "zlib"), ("int6", "zstd")):
        path = tmp_path / scheme
        ledger = write_artifact(path, state=state, model=config.model_dataclass(), tokenizer_sha256=data.tokenizer.sha256,
                                scheme=scheme, codec=codec)
        model.load_state_dict(read_artifact(path, expected_tokenizer_sha256=data.tokenizer.sha256).state)
        sizes[scheme], scores[scheme] = path.stat().st_size, score().bpb
        assert ledger.weight_bytes == sizes[scheme]
    loss = scores["int6"] - scores["int8"]
    print(f"\nuntrained {start:.4f}, float32 {full:.4f}, int8+zlib {scores['int8']:.4f} in {sizes['int8']:,} bytes, int6+zstd "
          f"{scores['int6']:.4f} in {sizes['int6']:,} bytes: {loss:+.4f} bpb for {sizes['int6'] / sizes['int8']:.1%} of the size")
    assert full < 0.75 * start, "the comparison means nothing on a model that has not been trained"
    assert sizes["int6"] < 0.92 * sizes["int8"]  # a third of these weights is the embedding, which both keep at 8 bits
    assert abs(scores["int8"] - full) < 0.005 and abs(loss) <= 0.02
