"""Reads the train logs of the challenge, in the dialects that its participants write.

A log may begin with the whole script; lines of settings, of warm-up, of steps and of validations follow, and after training sizes and
final scores. The first dialect (step:200/20000 train_loss:2.8041 train_time:8677ms step_avg:43.38ms) keeps no space after a colon, the
second (500/20000 train_loss: 3.3964 train_time: 0.9m tok/s: 7669991) leaves times out or rounds them to a tenth of a minute. Only a
line that is understood to its end is read. One that looks like a result and is not understood is in `unread`; lines that cannot all be
true are in `contradictions`. Nothing is guessed, and nothing that a log says is run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from bitsperbyte.run.log_lines import Final, Size, Step, Stop, Validation, contradictions_of, is_before_packing, label_of

_NUMBER = r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_COUNT = r"\d{1,3}(?:,\d{3})+|\d+"
_PREFIX = re.compile(r"^\s*(?:\[[^\]]*\]\s*|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*Z?\s*(?:[|-]\s*)?|\d\d:\d\d:\d\d[.,\d]*\s+)?")
_PAIR = re.compile(r"([A-Za-z_][\w/]*)\s*[:=]\s*([^\s:=]\S*)(?:\s+|$)")
_STEP = re.compile(r"(?:step:\s*)?(\d+)/(\d+)\s+(\S.*)")
_STOP = re.compile(r"stopping_early:\s*(\w+)\s+train_time:\s*(\S+)\s+step:\s*(\d+)(?:/(\d+))?")
_WARM_UP = re.compile(r"warmup_step:\s*(\d+)/(\d+)")
_MEMORY = re.compile(r"peak memory allocated:\s*(\d+) MiB(?:\s+reserved:\s*(\d+) MiB)?")
_DURATION = re.compile(rf"({_NUMBER})(ms|s|m|min)")
_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000}
_IN_MB = r"(?:\s*=\s*[\d.]+\s?MB)?"
_PACKED = re.compile(rf"Serialized model(?:\s+([\w.+ -]+?))?:\s*({_COUNT}) bytes(?:\s*\(([^()]*)\))?")
_PACKED_MLX = re.compile(rf"serialized_model_(\w+):\s*({_COUNT}) bytes(?:\s*\(([^()]*)\))?")
_ARTIFACT = re.compile(rf"(\w+) artifact:\s*({_COUNT}) bytes \((\w+)\){_IN_MB}")
_CODE = re.compile(rf"Code size(?:\s*\(([\w ]+)\))?:\s*({_COUNT}) bytes")
_EVAL_MODE = re.compile(r"(final_eval_mode:\s*\w+(?:\s+\w+[:=]\S+)*)")
_EVAL_WINDOW = re.compile(r"(eval_seq_len:\s*\d+)(?:\s+\([^()]*\))?")
_TOTAL = re.compile(rf"Total submission size(?:\s+([\w.+ -]+?))?:\s*({_COUNT}) bytes{_IN_MB}")
_SCORE = re.compile(r"\bval_(?:loss|bpb)\s*[:=]")
_RESULT = re.compile(r"val_loss|bpb|train_loss|validation_loss|serialized.model|submission.size|\bartifact\b|^final_|stopping_early"
                     r"|peak memory|code size|total_bytes|step time|_time:|\bloss[:=]", re.IGNORECASE)
_CODE_LIKE = re.compile(r"[{}]|\w\(|^#|^(?:import|from|def|class|return|if|for|while|try|with)\b|[,(]$|^[\"']")
_RULE, _SHORT_RULE = re.compile(r"^={100}[ \t]*\r?$", re.MULTILINE), re.compile(r"^={50,}[ \t]*\r?$", re.MULTILINE)
_COUNTS = {"model_params": "num_parameters", "world_size": "world_size", "grad_accum_steps": "grad_accum_steps", "seed": "seed",
           "train_batch_tokens": "batch_tokens", "train_seq_len": "train_window", "vocab_size": "vocab_size", "val_tokens": "val_tokens",
           "iterations": "iterations"}
_TEXTS = {"tokenizer_path": "tokenizer", "val_files": "val_pattern"}


@dataclass(frozen=True)
class TrainLog:
    """What a log says; None or empty is what it does not say. Losses (nats a token) and bits per byte are decimals in the digits printed."""

    source: str | None = None  # the script at the log's beginning
    settings: dict[str, str] = field(default_factory=dict)  # lines of settings before the first step, as text
    seed: int | None = None
    world_size: int | None = None
    grad_accum_steps: int | None = None
    num_parameters: int | None = None
    batch_tokens: int | None = None
    train_window: int | None = None
    vocab_size: int | None = None
    iterations: int | None = None  # steps planned
    budget_s: float | None = None
    dataset: str | None = None
    tokenizer: str | None = None  # path of its file
    val_pattern: str | None = None  # files of the validation text
    val_tokens: int | None = None
    warmup_steps: int | None = None  # those that were logged, not those that were planned
    steps: tuple[Step, ...] = ()
    validations: tuple[Validation, ...] = ()
    stopped: Stop | None = None
    peak_memory_mib: int | None = None
    reserved_memory_mib: int | None = None
    raw_bytes: int | None = None  # the weights as saved, not packed
    packed: tuple[Size, ...] = ()  # weights as packed
    code: tuple[Size, ...] = ()  # `packing` is what stands in brackets: compressed, uncompressed
    totals: tuple[Size, ...] = ()  # of code and packed weights; that of weights not packed is left out
    finals: tuple[Final, ...] = ()  # scores after training, of the packed model as read back
    diagnostics: tuple[Final, ...] = ()  # scores after training whose name says that they are of weights before packing
    unread: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    num_runs: int = 1  # 2: steps go back, so that figures of several runs, or of one resumed, stand in one file

    @property
    def num_steps(self) -> int | None:
        """Steps trained, where the log shows that training ended there: by the clock, at the number planned, or at a validation with
        results after it. A last line that just happens to be the last proves no end."""
        if self.num_runs > 1:
            return None
        if self.stopped:
            return self.stopped.step
        logged = [*self.steps, *self.validations]
        last = max((row.step for row in logged), default=None)
        if last is None:
            return None
        if any(row.step == row.iterations == last for row in logged):
            return last
        ended = bool(self.finals or self.diagnostics or self.packed or self.raw_bytes)
        return last if ended and self.validations and self.validations[-1].step == last else None

    @property
    def code_bytes(self) -> int | None:
        """Bytes of the code, where the log gives one figure or names one compressed."""
        named = {size.num_bytes for size in self.code if size.packing == "compressed"} or {size.num_bytes for size in self.code}
        return named.pop() if len(named) == 1 else None

    @property
    def weight_bytes(self) -> tuple[int, ...]:
        return tuple(size.num_bytes for size in self.packed)

    @property
    def total_bytes(self) -> tuple[int, ...]:
        return tuple(size.num_bytes for size in self.totals)


def parse_train_log(text: str) -> TrainLog:
    """Read a log; never raises for what stands in it."""
    return _Reader(text).log()


def compact(lines: list[str]) -> tuple[str, ...]:
    """Lines that differ in their numbers alone as the first of them and a count."""
    shapes: dict[str, list[str]] = {}
    for line in lines:
        shapes.setdefault(re.sub(r"[\d.,]+", "#", line), []).append(line)
    return tuple(same[0] if len(same) == 1 else f"{same[0]} (and {len(same) - 1:,} more such lines)" for same in shapes.values())


class _Reader:
    def __init__(self, text: str) -> None:
        self.facts: dict[str, object] = {}
        self.source, body = _split_source(text.replace("\r\n", "\n"))
        self.settings: dict[str, str] = {}
        self.steps: list[Step] = []
        self.validations: list[Validation] = []
        self.stops: list[Stop] = []
        self.raw: list[int] = []
        self.packed: list[Size] = []
        self.code: list[Size] = []
        self.totals: list[Size] = []
        self.scores: list[Final] = []
        self.warmup = 0
        self.unread: list[str] = []
        self.conflicts: list[str] = []
        self.num_runs = 1
        self.seen: set[Step | Validation] = set()
        self.is_copied = False  # lines from further up came again
        self.announced: dict[str, str] = {}  # what a line says of the score that follows it
        self.announced_of: str | None = None
        for line in body.splitlines():
            self._line(line)

    def log(self) -> TrainLog:
        stop = self.stops[0] if len(set(self.stops)) == 1 else None
        if len(set(self.stops)) > 1:
            self.conflicts.append("training is said to have stopped early at steps " + ", ".join(f"{s.step:,}" for s in self.stops))
        raw = self.raw[0] if len(set(self.raw)) == 1 else None
        whole = {raw + size.num_bytes for size in self.code} if raw is not None else set()
        totals = [size for size in self.totals if size.packing or size.num_bytes not in whole]
        finals = [score for score in self.scores if not is_before_packing(score.name)]
        conflicts = [*self.conflicts, *contradictions_of(self.steps, self.validations, self.scores, stop, self.num_runs)]
        return TrainLog(
            source=self.source, settings=self.settings, warmup_steps=self.warmup or None, steps=tuple(self.steps),
            validations=tuple(self.validations), stopped=stop, raw_bytes=raw, packed=_distinct(self.packed), code=_distinct(self.code),
            totals=_distinct(totals), finals=tuple(finals), diagnostics=tuple(s for s in self.scores if s not in finals),
            unread=compact(self.unread), contradictions=compact(conflicts), num_runs=self.num_runs,
            **{name: value for name, value in self.facts.items() if value is not None})

    def _line(self, raw_line: str) -> None:
        line = _PREFIX.sub("", raw_line, count=1).strip()
        if not line:
            return
        if any(read(line) for read in (self._step, self._stop, self._warm_up, self._memory, self._size, self._announcement, self._score,
                                       self._setting)):
            return
        if _RESULT.search(line) and re.search(r"\d", line) and not _CODE_LIKE.search(line) and len(line) < 2_000:
            self.unread.append(line)

    def _fact(self, name: str, value: object, word: str) -> None:
        """Keep a figure that a run has once; two that differ are kept out."""
        if name not in self.facts:
            self.facts[name] = value
        elif self.facts[name] != value:
            if self.facts[name] is not None:
                self.conflicts.append(f"{word} is {self.facts[name]} in one line and {value} in another")
            self.facts[name] = None

    def _step(self, line: str) -> bool:
        match = _STEP.fullmatch(line)
        pairs = _pairs(match[3]) if match else None
        if match is None or pairs is None:
            return False
        step, planned = int(match[1]), int(match[2])
        loss, val_loss, bpb = (_decimal(pairs.pop(key, None)) for key in ("train_loss", "val_loss", "val_bpb"))
        raw_time, raw_average = pairs.pop("train_time", None), pairs.pop("step_avg", None)
        train_ms, average_ms = _duration_ms(raw_time), _duration_ms(raw_average)
        if (raw_time is not None and train_ms is None) or (raw_average is not None and average_ms is None):
            return False
        coarse = raw_time is not None and raw_time.endswith(("m", "min"))
        if val_loss is not None and loss is None:
            row: Step | Validation = Validation(step, planned, val_loss, bpb, train_ms, average_ms, coarse)
            rows: list = self.validations
        elif loss is not None and val_loss is None and bpb is None:
            row, rows = Step(step, planned, loss, train_ms, average_ms, coarse), self.steps
        else:
            return False
        if row in self.seen:  # every rank may print, and a console's text may hold the log again
            self.is_copied = self.is_copied or step < rows[-1].step
            return True
        self.seen.add(row)
        if rows and step <= rows[-1].step:
            if step == rows[-1].step and not self.is_copied:
                self.conflicts.append(f"step {step:,} stands twice, with other figures")
            else:
                self.conflicts.append(f"steps go back from {rows[-1].step:,} to {step:,}: several runs, or a resumed one, stand in one log")
                self.num_runs = 2
        rows.append(row)
        self._fact("iterations", planned, "the number of planned steps")
        return True

    def _stop(self, line: str) -> bool:
        match = _STOP.fullmatch(line)
        ms = _duration_ms(match[2]) if match else None
        if match is None or ms is None:
            return False
        self.stops.append(Stop(match[1], int(match[3]), ms))
        return True

    def _warm_up(self, line: str) -> bool:
        match = _WARM_UP.fullmatch(line)
        if match:
            self.warmup = max(self.warmup, int(match[1]))
        return match is not None

    def _memory(self, line: str) -> bool:
        match = _MEMORY.fullmatch(line)
        if match is None:
            return False
        self._fact("peak_memory_mib", int(match[1]), "peak memory (MiB)")
        if match[2]:
            self._fact("reserved_memory_mib", int(match[2]), "reserved memory (MiB)")
        return True

    def _size(self, line: str) -> bool:
        if match := _PACKED.fullmatch(line) or _PACKED_MLX.fullmatch(line):
            inside = re.search(rf"\bpayload:({_COUNT})\b", match[3] or "")
            if match[1] is None:
                self.raw.append(_count(match[2]))
            else:
                self.packed.append(Size(_count(match[2]), match[1], _count(inside[1]) if inside else None))
        elif match := _ARTIFACT.fullmatch(line):
            self.packed.append(Size(_count(match[2]), f"{match[1].lower()}+{match[3]}"))
        elif match := _CODE.fullmatch(line):
            self.code.append(Size(_count(match[2]), match[1]))
        elif match := _TOTAL.fullmatch(line):
            self.totals.append(Size(_count(match[2]), match[1]))
        return match is not None

    def _announcement(self, line: str) -> bool:
        """How the next score is made, on a line before it: `final_eval_mode:sliding_window stride:64`, or, after training, `eval_seq_len:2048`."""
        ended = bool(self.stops or self.raw or self.packed)
        match = _EVAL_MODE.fullmatch(line) or (_EVAL_WINDOW.fullmatch(line) if ended else None)
        pairs = _pairs(match[1]) if match else None
        if pairs is None:
            return False
        self.announced, self.announced_of = {key: value for key, value in pairs.items() if value.isdigit()}, None
        return True

    def _score(self, line: str) -> bool:
        match = _SCORE.search(line)
        found = label_of(line[: match.start()]) if match else None
        pairs = _pairs(line[match.start():]) if match and found else None
        if pairs is None or found is None:
            return False
        name, before = found
        loss, bpb = (_decimal(pairs.pop(key, None)) for key in ("val_loss", "val_bpb"))
        asked = [key for key in ("val_loss", "val_bpb") if re.search(rf"\b{key}\b", line)]
        if [key for key, value in zip(("val_loss", "val_bpb"), (loss, bpb), strict=True) if value is not None] != asked:
            return False  # nan, or no number at all
        if self.announced_of is None:
            self.announced_of = name
        announced = self.announced if name.removesuffix("_exact") == self.announced_of else {}
        pairs = announced | before | pairs
        eval_ms = _duration_ms(pairs.get("eval_time") or pairs.get("elapsed"))
        final = Final(name, loss, bpb, eval_ms, {k: v for k, v in pairs.items() if k not in ("eval_time", "elapsed")})
        if final not in self.scores:
            self.scores.append(final)
        return True

    def _setting(self, line: str) -> bool:
        """Lines of key:value alone. Only those before the first step are settings; a few facts are taken wherever they stand."""
        single = re.fullmatch(r"([A-Za-z_]\w*):\s+(\S[^:]*)", line)
        pairs = {single[1]: single[2]} if single else _pairs(line)
        if not pairs or _RESULT.search(" ".join(pairs)) and not set(pairs) & {"tokenizer_path", "val_loss_every"}:
            return False
        if "val_loader" in pairs:
            pairs = {{"pattern": "val_files", "tokens": "val_tokens"}.get(key, key): value for key, value in pairs.items()}
        for key, value in pairs.items():
            if key in _COUNTS and re.fullmatch(_COUNT, value):
                self._fact(_COUNTS[key], _count(value), key)
            elif key in _TEXTS:
                self._fact(_TEXTS[key], value, key)
            elif key == "max_wallclock_seconds" and re.fullmatch(_NUMBER, value):
                self._fact("budget_s", float(value), key)
            elif key == "train_loader" and value.startswith("dataset:"):
                self._fact("dataset", value.removeprefix("dataset:"), "the data set")
            if not self.steps and not self.validations and len(value) < 300:
                self.settings.setdefault(key, value)
        return True


def _split_source(text: str) -> tuple[str | None, str]:
    """The script at the beginning, which a line of 100 equals signs ends, and the rest."""
    full = _RULE.search(text)
    rule = full or _SHORT_RULE.search(text)
    head = text[: rule.start()] if rule else ""
    imports = re.search(r"^(?:import|from) \w", head, re.MULTILINE)
    if rule and imports and (full or re.search(r"^\s*(?:def|class|async def) \w", head, re.MULTILINE)):
        return head.removesuffix("\n"), text[rule.end():]
    if rule and re.search(r"\b(?:exec|import)\b.*\b(?:lzma|zlib|brotli|base64|b85decode)\b", head):  # a script that unpacks itself
        return head.removesuffix("\n"), text[rule.end():]
    return None, text


def _pairs(text: str) -> dict[str, str] | None:
    """`key:value key=value ...` to its end, or None. A key that stands twice makes it None."""
    found: dict[str, str] = {}
    position = 0
    for key, value, end in _walk(text):
        if key in found:
            return None
        found[key], position = value, end
    return found if found and position == len(text) else None


def _walk(text: str) -> Iterator[tuple[str, str, int]]:
    position = 0
    while match := _PAIR.match(text, position):
        position = match.end()
        yield match[1], match[2], position


def _decimal(text: str | None) -> Decimal | None:
    return Decimal(text) if text is not None and re.fullmatch(_NUMBER, text) else None


def _duration_ms(text: str | None) -> float | None:
    match = _DURATION.fullmatch(text) if text else None
    return float(Decimal(match[1]) * _MS[match[2]]) if match else None


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _distinct(sizes: list[Size]) -> tuple[Size, ...]:
    return tuple(dict.fromkeys(sizes))
