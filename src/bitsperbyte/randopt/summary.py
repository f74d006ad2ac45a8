"""A record's `randopt` part in lines for a person: each figure with its interval, and the controls beside the gain."""

from typing import Any

WIDTH = 32


def summary(part: dict[str, Any]) -> list[str]:
    """Population, base, ensemble, each control, the tests between them, held-out text, speed; 95% intervals in brackets."""
    documents = part["task"]["kind"] == "likelihood"
    lines = [*_population(part["population"], part["base"]), *_test_set(part, documents), *(_difference(row) for row in part["tests"]),
             *_verifier(part), *_correlation(part["spearman"]), *_probes(part["probes"]), *_heldout(part["heldout"])]
    return [*lines, *_speed(part["throughput"].get("search"))]


def _population(population: dict[str, Any], base: dict[str, Any]) -> list[str]:
    lines = [f"population of {population['size']}; train reward of the base {base['train_reward']:.4f}, by sigma:"]
    for row in population["per_sigma"]:
        error = "" if row["standard_error"] is None else f" +- {row['standard_error']:.4f}"
        lines.append(_line(f"sigma {row['sigma']:g}", f"{row['mean']:.4f}{error}, n = {row['num']}, {row['share_above_base']:.0%} above the base"))
    return lines


def _test_set(part: dict[str, Any], documents: bool) -> list[str]:
    k, controls = part["ensemble"]["k"], part["controls"]
    sides = [("base", part["base"]), (f"ensemble of {k}", part["ensemble"]),
             *((f"ensemble of {row['k']} (secondary)", row) for row in part["secondary"]),
             (f"control: base majority of {k}", controls["base_majority"]), ("control: best single member", controls["best_single"])]
    lines = [f"test set, {'bits per byte' if documents else 'accuracy'}:"]
    lines += [_line(name, _figure(side["test"]) if side.get("test") else side["why"]) for name, side in sides]
    return [*lines, _random(f"control: random ensembles of {k}", controls["random_k"], "mean_bpb" if documents else "mean")]


def _verifier(part: dict[str, Any]) -> list[str]:
    k, verifier = part["ensemble"]["k"], part.get("verifier") or {}
    return [_line(f"{name} by verifier", f"{_figure(verifier[key])}, apart from the vote: right where any of them is")
            for key, name in (("ensemble", f"best of {k} members"), ("base_samples", f"best of {k} samples")) if verifier.get(key)]


def _correlation(spearman: dict[str, Any]) -> list[str]:
    name = "Spearman, train and test"
    if spearman.get("rho") is None:
        return [_line(name, spearman["why"])] if spearman.get("why") else []
    interval = "" if spearman.get("low") is None else f" [{spearman['low']:+.3f}, {spearman['high']:+.3f}]"
    return [_line(name, f"{spearman['rho']:+.3f}{interval} over {spearman['num']} members of the control pool")]


def _probes(probes: list[dict[str, Any]]) -> list[str]:
    return [_line(f"probe: rank {probe['rank']} alone", _figure(probe["test"]) + (f", held-out {probe['bpb']:.4f} bpb" if probe.get("bpb") else ""))
            for probe in probes]


def _heldout(heldout: dict[str, Any]) -> list[str]:
    if not heldout["enabled"]:
        return [f"held-out text: {heldout['why']}"]
    lines = [f"held-out bits per byte, {heldout['num_docs']} documents of {heldout['slice']}, {heldout['context']} tokens a window, "
             f"{heldout['base']['bytes_per_token']:.3f} bytes/token:"]
    lines += [_line(name.replace("_", " "), f"{heldout[name]['bpb']:.4f}") for name in ("base", "mixture", "mean_member", "best_single")]
    lines.append(_random("random mixtures", heldout["random_mixture"], "mean_bpb"))
    return lines + [_difference(row) for row in heldout["differences"]]


def _speed(search: dict[str, Any] | None) -> list[str]:
    if not search or not search["seeds_per_s"]:
        return []
    kind = "generated" if search.get("generated_tokens_per_s") is not None else "scored"
    return [_line("speed of the search", f"{search['seeds_per_s']:.2f} seeds/s, {search[f'{kind}_tokens_per_s']:,.0f} {kind} tokens/s, "
                                         f"{search['prompts_per_s']:.1f} prompts/s")]


def _line(name: str, value: str) -> str:
    return f"  {name:{WIDTH}} {value}"


def _figure(test: dict[str, Any]) -> str:
    if test.get("bpb") is not None:
        return f"{test['bpb']:.4f} ({test['bytes_per_token']:.3f} bytes/token)"
    return f"{test['accuracy']:.4f} [{test['low']:.4f}, {test['high']:.4f}], {test['num_correct']} of {test['num']}"


def _random(name: str, drawn: dict[str, Any], key: str) -> str:
    if drawn.get(key) is None:
        return _line(name, drawn["why"])
    num = drawn["num_mixtures" if key == "mean_bpb" else "num_subsets"]
    warning = f" ({drawn['warning']})" if drawn.get("warning") else ""
    return _line(name, f"{drawn[key]:.4f} on average, {drawn['low']:.4f} to {drawn['high']:.4f} over {num} drawn{warning}")


def _difference(row: dict[str, Any]) -> str:
    name = f"{row['a']} - {row['b']}".replace("_", " ")
    if row.get("difference_bpb") is not None:
        return _line(name, f"{row['difference_bpb']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]")
    return _line(name, f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}], McNemar p = {row['p_mcnemar']:.2g}")
