"""Runs of RandOpt: results.json, top_k_seeds.json and args.json as upstream writes them, record.json as its fast fork does."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bitsperbyte.metric.bpb import MAX_BYTES_PER_TOKEN, MIN_BYTES_PER_TOKEN, bits
from bitsperbyte.records.published import Published

_RESULTS = {"ensemble_results", "top_k_perturbs", "top_k_train_rewards", "base_test_accuracy"}
_FORK = {"ensemble_accuracy", "population_size"}
_SEEDS = {"top_k_models", "base_model_path"}


def is_randopt(table: dict[str, Any]) -> bool:
    """Whether a JSON object is one of RandOpt's files that hold a result."""
    keys = set(table)
    return len(keys & _RESULTS) >= 2 or keys >= _FORK or keys >= {"top_k_models"} or (keys >= {"base_model_path"} and bool(_members(table)))


def read_randopt(tables: Sequence[tuple[str, dict[str, Any]]]) -> Published:
    """One published run of the files of one folder (name, JSON object)."""
    made = Published("randopt")
    results: dict[str, Any] = {}
    seeds: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for name, table in tables:
        keys = set(table)
        if keys >= _FORK or len(keys & _RESULTS) >= 2:
            if results:
                raise ValueError(f"{name} is a second table of results: import the runs one by one")
            results = table
        elif keys & _SEEDS:
            seeds = table
        elif "population_size" in keys or "sigma_values" in keys:
            arguments = table
        else:
            made.unread.append(f"{name} is not a file of RandOpt that is known")
    made.figures = {name: value for name, value in (("results", results or seeds), ("top_k_seeds", seeds if results else {}),
                                                    ("arguments", arguments)) if value}
    config = results["config"] if isinstance(results.get("config"), dict) else {}
    seed = next((part["global_seed"] for part in (arguments, results, config) if part.get("global_seed") is not None), None)
    made.seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
    made.unread += [*_accuracies(results), *_members_agree(results, seeds), *_models_agree(results, seeds, arguments)]
    hardware = results.get("hardware")
    if isinstance(hardware, dict):
        made.provenance = {"device": hardware.get("gpu"), "num_devices": hardware.get("gpu_count")}
    if isinstance(results.get("git_commit"), str):
        made.provenance["commit"] = results["git_commit"]
    made.scores, sentences = _fineweb(results.get("fineweb"))
    made.unread += sentences
    return made


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def _accuracies(results: dict[str, Any]) -> Iterator[str]:
    """Percentages against the counts that they are of, and figures of different kinds under one name."""
    num = results.get("test_samples")
    ensembles = results.get("ensemble_results")
    by_set = isinstance(ensembles, dict) and bool(ensembles) and all(_is_by_k(row) for row in ensembles.values())  # several data sets
    rows = [(f"{k} of {name}", row) for name, table in ensembles.items() for k, row in table.items()] if by_set else (
        list(ensembles.items()) if isinstance(ensembles, dict) else [])
    num = None if by_set else num  # of which set the number is, is not said
    for k, row in rows:
        if not isinstance(row, dict):
            yield f"ensemble_results of K = {k} is {row!r}"
            continue
        percent, correct = _number(row.get("accuracy")), _number(row.get("correct"))
        if percent is None:
            yield f"ensemble_results of K = {k} has no number `accuracy`"
        elif correct is not None and isinstance(num, int) and num > 0 and abs(100 * correct / num - percent) > 0.51 * 10 ** -min(2, _digits(percent)):
            yield f"the ensemble of K = {k} has {correct:.0f} of {num} right, and states {percent}%"
        elif not 0 <= percent <= 100:
            yield f"the ensemble of K = {k} states {percent}%"
    if "base_train_accuracy" in results and "base_test_accuracy" in results and "ensemble_results" in results:
        yield ("base_test_accuracy stands beside base_train_accuracy: the versions that wrote both put a mean reward, part of it for format, under "
               "these names, so it does not compare with the ensemble's percentage of right answers")
    base = _number(results.get("base_test_accuracy"))
    if base is not None and base > 1 and base <= 100 and ensembles:
        yield f"base_test_accuracy {base} is more than 1: whether it is a percentage or a reward is not said"


def _is_by_k(row: Any) -> bool:
    """Whether a value is itself a table of ensembles by their size."""
    return isinstance(row, dict) and bool(row) and all(str(k).isdigit() and isinstance(value, dict) for k, value in row.items())


def _digits(value: float) -> int:
    return len(repr(value).partition(".")[2])


def _members(table: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """(seed, sigma, train reward) of a seeds file, whatever its list is called."""
    for value in table.values():
        if isinstance(value, list) and value and all(isinstance(item, dict) and {"seed", "sigma"} <= set(item) for item in value):
            return [(item["seed"], item["sigma"], item.get("train_reward")) for item in value]
    return []


def _members_agree(results: dict[str, Any], seeds: dict[str, Any]) -> Iterator[str]:
    pairs, rewards = results.get("top_k_perturbs"), results.get("top_k_train_rewards")
    if isinstance(pairs, list) and isinstance(rewards, list):
        if len(pairs) != len(rewards):
            yield f"{len(pairs)} members have {len(rewards)} train rewards"
        values = [_number(reward) for reward in rewards]
        if None in values or any(a < b for a, b in zip(values, values[1:], strict=False)):  # type: ignore[operator]
            yield "the train rewards of the best members are not numbers in falling order"
    members = _members(seeds)
    if members and isinstance(pairs, list) and [list(pair) if isinstance(pair, (list, tuple)) else pair for pair in pairs] != [
            [seed, sigma] for seed, sigma, _ in members]:
        yield "the members of results.json and of top_k_seeds.json are not the same"


def _models_agree(results: dict[str, Any], seeds: dict[str, Any], arguments: dict[str, Any]) -> Iterator[str]:
    for what, values in (("model", {results.get("model"), seeds.get("base_model_path"), arguments.get("model_name")}),
                         ("best sigma", {results.get("best_sigma"), seeds.get("best_sigma")})):
        known = {value for value in values if isinstance(value, (str, int, float))}
        if len(known) > 1:
            yield f"the files name more than one {what}: {', '.join(sorted(map(str, known)))}"


def _fineweb(part: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Scores of held-out text in the fork's record, and whether their bytes can be those of the scored tokens."""
    scores, sentences = [], []
    for name, row in part.items() if isinstance(part, dict) else ():
        if not isinstance(row, dict):
            continue
        bpb, loss, tokens, num_bytes = (_number(row.get(key)) for key in ("bpb", "nats_per_token", "n_scored_tokens", "n_bytes"))
        if bpb is None and loss is None:
            continue
        whole = int(tokens) if tokens and tokens >= 1 else None
        scores.append({"label": f"fineweb {name}", "bpb": bpb, "nats_per_token": loss, "num_tokens": whole,
                       "digits": _digits(bpb if bpb is not None else loss or 0.0)})
        if bpb and loss and tokens and num_bytes:
            if abs(bits(loss * tokens) / num_bytes / bpb - 1) > 1e-3:
                sentences.append(f"fineweb {name} states {bpb} bits per byte, and its {loss} nats a token, tokens and bytes give another figure")
            if not MIN_BYTES_PER_TOKEN <= num_bytes / tokens <= MAX_BYTES_PER_TOKEN:
                sentences.append(f"fineweb {name} has {num_bytes:.0f} bytes to {tokens:.0f} scored tokens: no tokenizer has so many or so few a "
                                 "token, so the bytes are not those of the scored text")
    return scores, sentences
