"""Runs of the challenge: train logs and submission.json, which has no schema, as published runs."""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import PurePosixPath
from statistics import fmean
from typing import Any

from bitsperbyte.records.published import Published, digits_of, implausible
from bitsperbyte.run.log_lines import Final, ratio_contradictions
from bitsperbyte.run.train_log import TrainLog, parse_train_log

_SEED_IN_NAME = re.compile(r"(?:seed|(?<![a-z])s)[_-]?(\d{1,18})(?!\d)", re.IGNORECASE)
_BPB, _LOSS = ("val_bpb", "bpb"), ("val_loss", "val_loss_nats")
_TOTAL, _CODE = ("bytes_total", "total_bytes"), ("bytes_code", "code_bytes")
_WEIGHTS = ("bytes_model", "bytes_model_compressed", "model_bytes", "weight_bytes")  # or bytes_model_int6_zstd and its like
_STEPS = ("step_stop", "steps", "num_steps", "steps_completed", "training_steps")
_OF_EITHER = ("artifact_bytes", "bytes_total", "total_bytes")  # of one seed: the weights or the whole
_MIB = 2**20
Scored = tuple[str, Decimal | None, Decimal | None]  # label, nats a token, bits per byte


def read_golf(logs: Sequence[tuple[str, str]], table: tuple[str, str] | None) -> Iterator[tuple[Published, str | None]]:
    """One published run for each log (name, text), or one of the table alone, with the log's name. `table`: name and text of submission.json."""
    facts = json.loads(table[1], parse_float=Decimal) if table else {}
    name = table[0] if table else ""
    parsed = [(file, parse_train_log(text)) for file, text in logs]
    if not parsed:
        yield _published(TrainLog(), None, facts, name, []), None
    for file, log in parsed:
        yield _published(log, file, facts, name, [other for _, other in parsed]), file


def _published(log: TrainLog, file: str | None, facts: dict[str, Any], table: str, logs: Sequence[TrainLog]) -> Published:
    made = Published("golf", unread=[*log.unread, *log.contradictions])
    made.seed = _seed(log, file, facts, made.unread)
    made.created_utc = _date(facts, made.unread)
    made.provenance = {"num_devices": log.world_size} if log.world_size else {}
    if isinstance(facts.get("hardware"), str):
        made.provenance = {"device": facts["hardware"]}
    made.data = {"source": log.dataset, "vocab_size": log.vocab_size,
                 "tokenizer_name": PurePosixPath(log.tokenizer.replace("\\", "/")).name if log.tokenizer else None}
    made.training = _training(log)
    made.artifact = _artifact(log, facts, made, logs)
    made.unread += _of_a_seed(log, facts, table, made.seed)
    made.unread += _steps_against(facts, table, logs)
    made.metrics = _metrics(log, made.unread)
    made.scores = [_score(final, log) for final in _without_rounded([*log.diagnostics, *log.finals])]
    if log.validations and log.validations[-1].step == log.num_steps:
        last = log.validations[-1]
        made.scores.insert(0, _score(Final("last_validation", last.val_loss, last.val_bpb), log))
    claims = list(_claims(facts, table, made.seed))
    made.scores += [_score(Final(label, loss, bpb), None) for label, loss, bpb in claims]
    made.unread += list(_against_logs(claims, facts, made.seed, log, logs, table))
    pairs = [(s.name, s.val_loss, s.val_bpb) for s in (*log.diagnostics, *log.finals)] + claims
    made.unread += [sentence for pair in pairs if (sentence := implausible(*pair))]
    made.figures = _figures(log, facts)
    return made


def _seed(log: TrainLog, file: str | None, facts: dict[str, Any], unread: list[str]) -> int | None:
    match = _SEED_IN_NAME.search(file) if file else None
    named = int(match[1]) if match else None
    if log.seed is not None and named is not None and log.seed != named:
        unread.append(f"the log says seed {log.seed}, and its name {file} says {named}")
    own = facts.get("seed")
    if log.seed is None and named is None:
        return own if isinstance(own, int) and not isinstance(own, bool) else None
    return log.seed if log.seed is not None else named


def _date(facts: dict[str, Any], unread: list[str]) -> str | None:
    said = facts.get("date")
    if said is None:
        return None
    try:
        time = datetime.fromisoformat(str(said).strip())
    except ValueError:
        unread.append(f"the date {said!r} is not understood")
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).isoformat()


def _training(log: TrainLog) -> dict[str, Any]:
    end = log.num_steps
    rows = [row for row in (*log.steps, *log.validations) if row.step == end]
    average = next((row.step_avg_ms for row in reversed(rows) if row.step_avg_ms is not None), None)
    times = [log.stopped.train_time_ms] if log.stopped else [row.train_time_ms for row in rows if row.train_time_ms is not None and not row.coarse]
    loss = next((float(row.train_loss) for row in log.steps if row.step == end), None)
    one = log.num_runs == 1
    return {"num_steps": end, "batch_tokens": log.batch_tokens, "num_parameters": log.num_parameters, "step_ms_mean": average if one else None,
            "train_s": times[-1] / 1e3 if times and one else None, "budget_s": log.budget_s, "final_train_loss": loss if one else None,
            "peak_memory_bytes": log.peak_memory_mib * _MIB if log.peak_memory_mib is not None else None}


def _steps_against(facts: dict[str, Any], table: str, logs: Sequence[TrainLog]) -> Iterator[str]:
    """A claimed number of steps that none of the logs ends at, nor their mean."""
    claimed = next((facts[name] for name in _STEPS if _is_count(facts.get(name))), None)
    ends = [log.num_steps for log in logs]
    if claimed is None or not ends or None in ends or claimed in ends or abs(fmean(ends) - claimed) < 1:
        return
    yield f"{table} states {claimed:,} steps, and the log ends at {', '.join(f'{end:,}' for end in ends)}"


def _of_a_seed(log: TrainLog, facts: dict[str, Any], table: str, seed: int | None) -> Iterator[str]:
    """The bytes claimed of this seed against its own log."""
    known = [size.num_bytes for size in (*log.totals, *log.packed)]
    for path, result in _results_by_seed(facts):
        claimed = next((result[name] for name in _OF_EITHER if _is_count(result.get(name))), None)
        if seed is not None and path.rpartition(".")[2] == str(seed) and claimed is not None and known and claimed not in known:
            yield f"{table}:{path} states {claimed:,} bytes, and the log {', '.join(f'{n:,}' for n in known)}"


def _results_by_seed(facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path ending in the seed, its results), however the table holds them."""
    for key, value in facts.items():
        if isinstance(value, dict):
            for name, result in value.items():
                if isinstance(result, dict) and (match := re.fullmatch(r"(?:seed_?)?(\d+)", str(name))):
                    yield f"{key}.{match[1]}", result
        elif isinstance(value, list) and "seed" in str(key):
            yield from ((f"{key}.{item['seed']}", item) for item in value if isinstance(item, dict) and item.get("seed") is not None)


def _artifact(log: TrainLog, facts: dict[str, Any], made: Published, logs: Sequence[TrainLog]) -> dict[str, Any] | None:
    """Sizes that agree: weights and code that sum to a total of the same log, or the only ones that it gives. The table may state those of
    another log beside it."""
    weights, codes, totals = (list(dict.fromkeys(s.num_bytes for s in sizes)) for sizes in (log.packed, log.code, log.totals))
    sums = [(w, c) for w in weights for c in codes if w + c in totals]
    part: dict[str, Any] = {}
    if len(sums) == 1:
        part = {"weight_bytes": sums[0][0], "code_bytes": sums[0][1], "total_bytes": sum(sums[0])}
    else:
        part = {"code_bytes": log.code_bytes, "total_bytes": totals[0] if len(totals) == 1 else None}
        if not totals and len(weights) == 1:
            part["weight_bytes"] = weights[0]
        if len(sums) > 1:
            made.unread.append(f"several sizes of code and weights sum to a total ({', '.join(f'{w:,} + {c:,}' for w, c in sums)}): which was "
                               "shipped is not said")
            part = {}
        elif totals and weights and codes:
            made.unread.append(f"no sum of code ({', '.join(f'{c:,}' for c in codes)}) and weights ({', '.join(f'{w:,}' for w in weights)}) is the "
                               f"total of the log ({', '.join(f'{t:,}' for t in totals)} bytes)")
    packed = next((size for size in log.packed if size.num_bytes == part.get("weight_bytes")), None)
    packed = packed or (log.packed[0] if len(log.packed) == 1 else None)
    if packed:
        part |= {"scheme": packed.scheme, "codec": packed.codec, "payload_bytes": packed.payload_bytes}
    weight_names = [*_WEIGHTS, *(name for name in facts if name.startswith("bytes_model_"))]
    of_any = [{size.num_bytes for other in logs for size in sizes(other)} for sizes in (lambda o: o.totals, lambda o: o.code, lambda o: o.packed)]
    of_any[2] |= {other.raw_bytes for other in logs if other.raw_bytes}
    for key, names, known, anywhere in zip(("total_bytes", "code_bytes", "weight_bytes"), (_TOTAL, _CODE, weight_names), (totals, codes, weights),
                                           of_any, strict=True):
        claimed = next((facts[name] for name in names if _is_count(facts.get(name))), None)
        if claimed is None:
            continue
        if known and claimed not in anywhere:
            made.unread.append(f"submission.json states {claimed:,} bytes ({key}), and the log {', '.join(f'{n:,}' for n in known)}")
        elif not known and part.get(key) is None:
            part[key] = claimed
    figures = [part.get(key) for key in ("code_bytes", "weight_bytes", "total_bytes")]
    if None not in figures and figures[0] + figures[1] != figures[2]:
        made.unread.append(f"{figures[0]:,} bytes of code and {figures[1]:,} of weights are not the {figures[2]:,} stated in all")
        part["weight_bytes"] = None
    return part if any(value is not None for value in part.values()) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _metrics(log: TrainLog, unread: list[str]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl for every step and validation whose time the log gives; the milliseconds of a single step it does not give."""
    if log.num_runs > 1:
        unread.append("the steps of several runs stand in one log: no curve is drawn of them")
        return []
    times: dict[int, float] = {0: 0.0}
    for row in log.steps:
        if row.train_time_ms is not None:
            times[row.step] = row.train_time_ms
    if log.stopped:
        times[log.stopped.step] = log.stopped.train_time_ms
    rows: list[tuple[int, int, dict[str, Any]]] = []
    left_out = []
    for order, row in [*((0, row) for row in log.steps), *((1, row) for row in log.validations)]:
        ms = row.train_time_ms if row.train_time_ms is not None else times.get(row.step)
        if ms is None:
            left_out.append(row.step)
        elif order == 0:
            rows.append((row.step, order, {"step": row.step, "loss": float(row.train_loss), "elapsed_s": ms / 1e3, "step_ms": None}))
        else:
            bpb = float(row.val_bpb) if row.val_bpb is not None else None
            rows.append((row.step, order, {"step": row.step, "val_loss": float(row.val_loss), "val_bpb": bpb, "elapsed_s": ms / 1e3}))
    if left_out:
        unread.append(f"{len(left_out)} lines of steps have no training time (the first is step {left_out[0]:,}): metrics.jsonl leaves them out")
    return [row for _, _, row in sorted(rows, key=lambda item: item[:2])]


def _without_rounded(finals: Sequence[Final]) -> list[Final]:
    """A score and the line with its exact digits are one, with the seconds of either."""
    by_name = {final.name: final for final in finals}
    kept = []
    for final in finals:
        exact = by_name.get(final.name + "_exact")
        if exact is not None and _rounds_to(final.val_bpb, exact.val_bpb) and _rounds_to(final.val_loss, exact.val_loss):
            continue
        rounded = by_name.get(final.name.removesuffix("_exact")) if final.name.endswith("_exact") else None
        if rounded is not None and _rounds_to(rounded.val_bpb, final.val_bpb) and _rounds_to(rounded.val_loss, final.val_loss):
            seconds = final.eval_time_ms if final.eval_time_ms is not None else rounded.eval_time_ms
            final = Final(rounded.name, final.val_loss, final.val_bpb, seconds, rounded.settings | final.settings)
        kept.append(final)
    return kept


def _rounds_to(rounded: Decimal | None, exact: Decimal | None) -> bool:
    """Whether the two are one number, to a unit of the last digit that both have."""
    return rounded is None or exact is not None and abs(rounded - exact) <= Decimal(1).scaleb(-min(digits_of(rounded), digits_of(exact)))


def _score(final: Final, log: TrainLog | None) -> dict[str, Any]:
    """As a PublishedScore: windows only where the score's own line gives them."""
    digits = final.val_bpb if final.val_bpb is not None else final.val_loss
    said = {name: int(text) for name, text in final.settings.items() if text.isdigit()}
    return {"label": final.name, "nats_per_token": None if final.val_loss is None else float(final.val_loss),
            "bpb": None if final.val_bpb is None else float(final.val_bpb), "digits": None if digits is None else digits_of(digits),
            "window": next((said[name] for name in ("seq_len", "eval_seq_len", "window") if said.get(name)), None),
            "stride": said.get("stride") or said.get("eval_stride") or None,  # of 0 a script says what it means, and its log does not
            "seconds": None if final.eval_time_ms is None else final.eval_time_ms / 1e3}


def _claims(table: dict[str, Any], file: str, seed: int | None, path: str = "", seeds_below: bool = False) -> Iterator[Scored]:
    """Scores in submission.json, wherever they stand; those of another seed are another run's."""
    bpb, loss = _figure(table, _BPB), _figure(table, _LOSS)
    if bpb is not None or loss is not None:
        yield f"{file}{path}", loss, bpb
    for key, value in table.items():
        if isinstance(value, dict):
            of_seed = re.fullmatch(r"(?:seed_?)?(\d+)", str(key))
            if of_seed and seed is not None and int(of_seed[1]) != seed:
                continue
            yield from _claims(value, file, seed, f"{path}:{key}" if not path else f"{path}.{key}")
        elif isinstance(value, list) and "seed" in str(key):
            for item in value:
                if isinstance(item, dict) and item.get("seed") is not None and (seed is None or item["seed"] == seed):
                    yield from _claims(item, file, seed, f"{path}:{key}.{item['seed']}")


def _figure(table: dict[str, Any], names: Sequence[str]) -> Decimal | None:
    for name in names:
        value = table.get(name)
        if isinstance(value, (Decimal, int)) and not isinstance(value, bool) and Decimal(value).is_finite() and value >= 0:
            return Decimal(value)
    return None


def _against_logs(claims: Sequence[Scored], facts: dict[str, Any], seed: int | None, log: TrainLog, logs: Sequence[TrainLog],
                  table: str) -> Iterator[str]:
    """Claims that none of the log's scores is; a headline may be any log's or the mean of all, those included that the table alone has."""
    results = [result for _, result in _results_by_seed(facts)]
    for label, loss, bpb in claims:
        own = label.rpartition(".")[2] == str(seed)
        for what, claim in (("val_bpb", bpb), ("val_loss", loss)):
            known = [_values(other, what) for other in ([log] if own else logs)]
            flat = [value for values in known for value in values.values()]
            if claim is None or not flat or any(_equal(claim, value) for value in flat):
                continue
            names = set.intersection(*(set(values) for values in known)) if len(known) > 1 else set()
            means = [Decimal(str(fmean(float(values[name]) for values in known))) for name in names]
            stated = [_figure(result, _BPB if what == "val_bpb" else _LOSS) for result in results]
            if not own and len(stated) > len(logs) and None not in stated:  # logs of some seeds are not here
                means.append(Decimal(str(fmean(map(float, stated)))))
            if any(abs(claim - mean) <= Decimal(1).scaleb(-min(digits_of(claim), 4)) for mean in means):
                continue
            last = list(_values(log, what).values())[-1:] or flat[-1:]
            yield f"{label} states {what} {claim}, and no score of the log is that (its last is {last[0]})"
    scores = [Final(label, loss, bpb) for label, loss, bpb in claims if loss is not None and bpb is not None]
    named = {score.name for score in scores}
    for sentence in ratio_contradictions(log.validations, [*log.diagnostics, *log.finals, *scores]):
        if any(f" of {name} " in sentence for name in named):
            yield sentence


def _values(log: TrainLog, what: str) -> dict[str, Decimal]:
    rows = [(f"step {v.step}", getattr(v, what)) for v in log.validations[-1:]]
    rows += [(f.name, getattr(f, what)) for f in (*log.diagnostics, *log.finals)]
    return {name: value for name, value in rows if value is not None}


def _equal(claim: Decimal, value: Decimal) -> bool:
    return abs(claim - value) <= Decimal(1).scaleb(-min(digits_of(claim), digits_of(value)))


def _figures(log: TrainLog, facts: dict[str, Any]) -> dict[str, Any]:
    """What else the files say, in their own words and numbers."""
    def sizes(found: Sequence[Any]) -> list[dict[str, Any]]:
        return [{"bytes": size.num_bytes, "as": size.packing} for size in found]

    said = {"iterations": log.iterations, "world_size": log.world_size, "grad_accum_steps": log.grad_accum_steps, "train_window": log.train_window,
            "val_tokens": log.val_tokens, "val_files": log.val_pattern, "warmup_steps": log.warmup_steps, "raw_bytes": log.raw_bytes,
            "reserved_memory_mib": log.reserved_memory_mib, "packed": sizes(log.packed), "code": sizes(log.code), "totals": sizes(log.totals),
            "stopped_early": log.stopped.reason if log.stopped else None, "embeds_source": log.source is not None,
            "last_logged_step": max((row.step for row in (*log.steps, *log.validations)), default=None) if log.num_steps is None else None,
            "settings": log.settings, "submission": _plain(facts)}
    return {name: value for name, value in said.items() if value not in (None, [], {}, False)}


def _plain(value: Any) -> Any:
    """JSON with Decimals as floats again."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
