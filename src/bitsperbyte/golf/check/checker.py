"""`bpb golf check`: every check of a submission folder, ours or a stranger's, one finding each."""

from pathlib import Path

from bitsperbyte.golf.check.budget import BUDGET_S, check_budget
from bitsperbyte.golf.check.files import check_code, check_files
from bitsperbyte.golf.check.folder import SCRIPT, read_submission
from bitsperbyte.golf.check.inspection import inspect_code
from bitsperbyte.golf.check.logs import check_bytes, check_logs, check_seeds
from bitsperbyte.golf.check.score import check_score
from bitsperbyte.golf.check.sizes import check_sizes
from bitsperbyte.golf.findings import Finding


def check_submission(path: Path, *, data: Path | None = None, budget_s: float = BUDGET_S, evaluation_budget_s: float = BUDGET_S,
                     run: bool = False, device_name: str = "auto", limit_s: float = BUDGET_S) -> list[Finding]:
    """The findings of the folder at `path`: files, code, sizes, log, bytes, seeds, budget, score, and run where its script was run.

    `data`: a folder of shards to score the artifact on again. `run`: try a few steps of the script, without the network, for at most
    `limit_s` seconds. Nothing in the folder is trusted, and none of its code is run without `data` or `run`. ValueError where there is
    no such folder, or `data` cannot be used.
    """
    if budget_s <= 0 or evaluation_budget_s <= 0 or limit_s <= 0:
        raise ValueError("a budget and a time limit are more than 0 seconds")
    found = read_submission(path)
    code = inspect_code(path / SCRIPT, found.script) if found.script is not None else None
    local_files = [(p.relative_to(path).as_posix(), p.stat().st_size) for p in code.local_files] if code else []
    logs = check_logs(found, code)
    own = [log for log in found.logs if log.name not in logs.foreign]
    return [
        check_files(found, code),
        check_code(code),
        check_sizes(found, local_files, own),
        logs.finding,
        check_bytes(found, own),
        check_seeds(found),
        check_budget(found, own, budget_s=budget_s, evaluation_budget_s=evaluation_budget_s),
        *check_score(found, data, device_name=device_name, limit_s=limit_s, run=run),
    ]
