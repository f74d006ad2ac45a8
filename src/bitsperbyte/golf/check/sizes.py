"""Bytes of code and of weights: what lies on the disk, what submission.json claims, and what the logs counted.

The disk decides. Where the artifact is not in the folder, as in most public submissions, claims can only be held against the logs;
that proves nothing, and the finding says so.
"""

from collections.abc import Iterable, Sequence
from decimal import Decimal

from bitsperbyte.golf.check.claims import CODE, TOTAL, WEIGHTS, WEIGHTS_OR_TOTAL, Claim
from bitsperbyte.golf.check.folder import FACTS, SCRIPT, LogFile, Submission
from bitsperbyte.golf.check.readings import code_sizes, total_sizes, weight_sizes
from bitsperbyte.golf.findings import Finding
from bitsperbyte.golf.ledger import CAP_BYTES


def check_sizes(found: Submission, local_files: Sequence[tuple[str, int]], logs: Sequence[LogFile]) -> Finding:
    """The finding `sizes`. `local_files`: further files of code with their bytes. `logs`: those that are of this submission's runs."""
    code, weights = found.script_size, found.artifact_size
    wrong = list(_code(found, local_files, logs))
    wrong += _weights(found, logs)
    wrong += _total(found, local_files, logs)
    wrong += [clause for log in logs for clause in _sum(log)]
    if wrong:
        return Finding("sizes", False, "; ".join(wrong))
    if code is not None and weights is not None:
        total = code + weights
        return Finding("sizes", True, f"{code:,} bytes of code and {weights:,} of weights are {total:,} of {CAP_BYTES:,}, "
                                      f"{CAP_BYTES - total:,} left{_beside(local_files)}")
    if found.logs and not logs:
        return Finding("sizes", None, "no artifact lies in the folder, and the logs are of other runs, so there is nothing to hold the sizes against")
    totals = sorted({total for log in logs for total in total_sizes(log.log)})
    if not totals and not (found.claims and any(found.claims.all(TOTAL + WEIGHTS_OR_TOTAL))):
        return Finding("sizes", None, "no artifact lies in the folder, and neither its log nor submission.json gives sizes")
    lacking = "artifact" if weights is None else SCRIPT
    claimed = found.claims is not None and any(found.claims.all(TOTAL + WEIGHTS_OR_TOTAL))
    if totals and claimed:
        seen = f"the claims agree with the log and are under the cap of {CAP_BYTES:,}"
    else:
        seen = f"{'the log' if totals else FACTS} alone gives a total, which is under the cap of {CAP_BYTES:,}"
    known = f"; {code:,} bytes of code are as claimed" if code is not None else ""
    return Finding("sizes", None, f"unproven, since no {lacking} lies in the folder: {seen}{known}{_beside(local_files)}")


def _beside(local_files: Sequence[tuple[str, int]]) -> str:
    if not local_files:
        return ""
    return f"; beside {SCRIPT} it imports {', '.join(name for name, _ in local_files)} ({sum(size for _, size in local_files):,} bytes)"


def _code(found: Submission, local_files: Sequence[tuple[str, int]], logs: Sequence[LogFile]) -> Iterable[str]:
    if found.script_size is None:
        claim = found.claims.get(CODE) if found.claims else None
        counted = [size for log in logs for size in code_sizes(log.log)]
        if claim and counted and claim.value not in counted:
            near = min(counted, key=lambda n: abs(n - claim.value))
            yield f"{FACTS} claims {claim}, and the {_log_or_logs(logs)} counted {near:,}: {_off(near, claim.value)}"
        return
    sizes = {found.script_size, found.script_size + sum(size for _, size in local_files)}
    claim = found.claims.get(CODE) if found.claims else None
    if claim and claim.value not in sizes:
        yield f"{SCRIPT} has {found.script_size:,} bytes, and {FACTS} claims {claim}: {_off(found.script_size, claim.value)}"
    elif not _other_code_was_counted(found):
        for log in logs:
            counted = code_sizes(log.log)
            if counted and not sizes & set(counted):
                near = min(counted, key=lambda n: abs(n - found.script_size))
                yield f"{SCRIPT} has {found.script_size:,} bytes, and {log.name} counted {near:,}: {_off(found.script_size, near)}"
                return


def _other_code_was_counted(found: Submission) -> bool:
    """Whether the submission says that its runs counted another script: then it is held to its own claim alone."""
    return found.claims is not None and found.claims.facts.get("code_as_recorded", True) is not True


def _weights(found: Submission, logs: Sequence[LogFile]) -> Iterable[str]:
    """The artifact on the disk against what is claimed of it and what its log counted."""
    size = found.artifact_size
    if size is None or found.artifact is None:
        known = [number for log in logs for number in (*weight_sizes(log.log), log.log.raw_bytes) if number is not None]
        for claim in found.claims.all(WEIGHTS) if found.claims and any(weight_sizes(log.log) for log in logs) else ():
            if claim.value not in known and not _matches(claim, [number for log in logs for number in weight_sizes(log.log)]):
                near = min(known, key=lambda n: abs(n - claim.value))
                yield f"{FACTS} claims {claim}, and the {_log_or_logs(logs)} counted {near:,}: {_off(near, claim.value)}"
        return
    name = found.artifact.name
    code = found.script_size or 0
    names_one = found.claims is not None and isinstance(found.claims.facts.get("artifact"), dict)  # so its sizes are of that one seed
    if found.claims:
        for claim in (*found.claims.all(WEIGHTS), *found.claims.all(WEIGHTS_OR_TOTAL)):
            either = (size, size + code) if claim.key in WEIGHTS_OR_TOTAL else (size,)
            if claim.value not in either and (names_one or not _is_over_seeds(claim, logs)):
                yield f"{name} has {size:,} bytes, and {FACTS} claims {claim}: {_off(size, claim.value)}"
                return
    counted = {number for log in logs for number in weight_sizes(log.log)}
    if counted and size not in counted:
        near = min(counted, key=lambda n: abs(n - size))
        yield f"{name} has {size:,} bytes, and the log counted {near:,}: {_off(size, near)}"


def _total(found: Submission, local_files: Sequence[tuple[str, int]], logs: Sequence[LogFile]) -> Iterable[str]:
    claim = found.claims.get(TOTAL) if found.claims else None
    code, weights = found.script_size, found.artifact_size
    totals = [total for log in logs for total in total_sizes(log.log)]
    if code is not None and weights is not None:
        total = code + weights
        names_one = found.claims is not None and isinstance(found.claims.facts.get("artifact"), dict)
        if claim and claim.value != total and (names_one or not _is_over_seeds(claim, logs)):
            yield f"code and artifact have {total:,} bytes together, and {FACTS} claims {claim}: {_off(total, claim.value)}"
        largest = max([total, total + sum(size for _, size in local_files)])
        if largest > CAP_BYTES:
            yield f"{largest:,} bytes are {largest - CAP_BYTES:,} over the cap of {CAP_BYTES:,}"
        return
    if found.claims and totals and not _other_code_was_counted(found):
        weights_too = [*totals, *(size for log in logs for size in weight_sizes(log.log))]
        for stated, known in [(claim, totals), *((c, weights_too) for c in found.claims.all(WEIGHTS_OR_TOTAL))]:
            if stated and not _matches(stated, known) and not (stated is not claim and _matches(stated, totals)):
                near = min(known, key=lambda n: abs(n - stated.value))
                yield f"{FACTS} claims {stated}, and the {_log_or_logs(logs)} counted {near:,}: {_off(near, stated.value)}"
                break
    yield from _seed_totals(found, logs)
    over = [n for n in [*totals, *([claim.value] if claim else [])] if n > CAP_BYTES]
    if over:
        yield f"{max(over):,} bytes are {max(over) - CAP_BYTES:,} over the cap of {CAP_BYTES:,}"


def _sum(log: LogFile) -> Iterable[str]:
    """A log's total against its code and weights."""
    codes, weights, totals = code_sizes(log.log), weight_sizes(log.log), total_sizes(log.log)
    sums = {c + w for c in codes for w in weights}
    for total in totals:
        if sums and total not in sums:
            near = min(sums, key=lambda n: abs(n - total))
            yield f"{log.name} counts {total:,} in all, and its code and weights are {near:,}: {_off(near, total)}"


def _seed_totals(found: Submission, logs: Sequence[LogFile]) -> Iterable[str]:
    """The sizes claimed of each seed against its own log."""
    if found.claims is None:
        return
    for log in logs:
        if log.seed is None:
            continue
        known = {*total_sizes(log.log), *weight_sizes(log.log)}
        whole = () if _other_code_was_counted(found) else found.claims.all(TOTAL, log.seed)
        for claim in (*whole, *found.claims.all(WEIGHTS_OR_TOTAL, log.seed), *found.claims.all(WEIGHTS, log.seed)):
            if known and claim.value not in known:
                near = min(known, key=lambda n: abs(n - claim.value))
                yield f"{FACTS} claims {claim}, and {log.name} counted {near:,}: {_off(near, claim.value)}"


def _matches(claim: Claim, totals: Sequence[int]) -> bool:
    """Whether a claim of the whole is the total of one log, or their mean to the byte."""
    return claim.value in totals or abs(Decimal(sum(totals)) / len(totals) - claim.value) < 1


def _is_over_seeds(claim: Claim, logs: Sequence[LogFile]) -> bool:
    """Whether a claim is of several seeds (one of them, their mean) where one artifact alone lies in the folder."""
    if len(logs) < 2:
        return False
    for numbers in ([n for log in logs for n in total_sizes(log.log)], [n for log in logs for n in weight_sizes(log.log)]):
        if numbers and _matches(claim, numbers):
            return True
    return False


def _log_or_logs(logs: Sequence[LogFile]) -> str:
    return "log" if len(logs) == 1 else "nearest of the logs"


def _off(found: int, claimed: Decimal | int) -> str:
    difference = found - claimed
    return f"{abs(difference):,} {'byte' if abs(difference) == 1 else 'bytes'} {'more' if difference > 0 else 'fewer'}"
