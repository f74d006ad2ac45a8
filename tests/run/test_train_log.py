"""Lines and figures are those of public logs of the challenge, named where they stand."""

import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.run.log_lines import Final, label_of
from bitsperbyte.run.train_log import TrainLog, compact, parse_train_log

BASELINE = """\
W0318 14:37:59.159000 871689 site-packages/torch/distributed/run.py:852] *****************************************
NCCL version 2.27.5+cuda12.9
[2026-03-18 14:38:12] node:871785:871865 [6] p2p_plugin.c:565 NCCL WARN NET/IB : Unable to open device mlx5_an0
val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=/data/tokenizers/fineweb_1024_bpe.model
train_loader:dataset:fineweb10B_sp1024 train_shards:25
val_loader:shards pattern=/data/fineweb10B_sp1024/fineweb_val_*.bin tokens:63779840
model_params:17059912
world_size:8 grad_accum_steps:1
sdp_backends:cudnn=False flash=True mem_efficient=False math=False
tie_embeddings:True embed_lr:0.05 head_lr:0.0 matrix_lr:0.04 scalar_lr:0.04
train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000
seed:1337
warmup_step:1/20
warmup_step:20/20
step:0/20000 val_loss:6.9370 val_bpb:4.0978 train_time:0ms step_avg:0.01ms
step:1/20000 train_loss:6.9408 train_time:24ms step_avg:23.99ms
step:200/20000 train_loss:2.8041 train_time:8677ms step_avg:43.38ms
step:200/20000 val_loss:2.8397 val_bpb:1.6774 train_time:8699ms step_avg:43.49ms
step:13750/20000 train_loss:1.9910 train_time:598726ms step_avg:43.54ms
step:13780/20000 val_loss:2.0606 val_bpb:1.2172 train_time:600038ms step_avg:43.54ms
stopping_early: wallclock_cap train_time:600038ms step:13780/20000
peak memory allocated: 10184 MiB reserved: 10200 MiB
Serialized model: 67224983 bytes
Code size: 47642 bytes
Total submission size: 67272625 bytes
Serialized model int8+zlib: 15815847 bytes (payload:17178912 raw_torch:17224025 payload_ratio:3.91x)
Total submission size int8+zlib: 15863489 bytes
final_int8_zlib_roundtrip val_loss:2.0727 val_bpb:1.2244 eval_time:1401ms
final_int8_zlib_roundtrip_exact val_loss:2.07269931 val_bpb:1.22436570
"""  # the published baseline, 2026-03-17_NaiveBaseline

SECOND = """\
Hyperparameters:
  eval_seq_len: 2560
  max_wallclock_seconds: 600.0
  seed: 314
  tokenizer_path: ./data/fineweb_8192_bpe_lossless_caps_caseops_v1_reserved.model
  train_batch_tokens: 786432
  val_files: ./data/fineweb_val_*.bin
  val_loss_every: 4000
  vocab_size: 8192
  world_size: 8
train_shards: 1499
val_tokens: 47851520
model_params:35945673
gptq:reserving 0s, effective=599500ms
warmup_step: 20/20
loop_warmup:enabled encoder:[0, 1, 2, 3, 4, 5, 3, 4] decoder:[5, 3, 4, 5, 6, 7, 8, 9, 10]
loop_warmup_step: 20/20
0/20000 val_loss: 8.9980 val_bpb: 4.1114
1/20000 train_loss: 8.9988 train_time: 0.0m tok/s: 12402817
500/20000 train_loss: 2.7320 train_time: 0.8m tok/s: 8425708
layer_loop:enabled step:2240 frac:0.350 encoder:[0, 1, 2, 3, 4, 5, 3, 4] decoder:[5, 3, 4, 5, 6, 7, 8, 9, 10]
4000/20000 train_loss: 2.5093 train_time: 7.6m tok/s: 6870936
4000/20000 val_loss: 2.4260 val_bpb: 1.1085
5025/20000 val_loss: 2.3485 val_bpb: 1.0731
stopping_early: wallclock_cap train_time: 599675ms step: 5025/20000
peak memory allocated: 41697 MiB reserved: 41720 MiB
diagnostic pre-quantization post-ema val_loss:2.32177803 val_bpb:1.06086950 eval_time:11147ms
Serialized model: 135418111 bytes
Code size (uncompressed): 191274 bytes
Code size (compressed): 37155 bytes
GPTQ:collected 67 Hessians in 3.6s
pergroup:total frame 15905033 bytes
Serialized model quantized+pergroup: 15905033 bytes
Total submission size quantized+pergroup: 15942188 bytes
diagnostic quantized val_loss:2.34009895 val_bpb:1.06924071 eval_time:12530ms
ttt_phased: total_docs:50000 prefix_docs:2500 suffix_docs:47500 num_phases:1 boundaries:[2500]
tttg: c1/289 lr:0.001000 t:0.3s
"""  # a submission of 2026-05-01 with case tokens, seed 314


def test_published_baseline() -> None:
    log = parse_train_log(BASELINE)
    assert (log.num_steps, log.stopped.reason, log.stopped.train_time_ms) == (13_780, "wallclock_cap", 600_038.0)
    assert (log.seed, log.world_size, log.num_parameters, log.batch_tokens) == (1337, 8, 17_059_912, 524_288)
    assert (log.val_tokens, log.dataset, log.train_window, log.budget_s) == (63_779_840, "fineweb10B_sp1024", 1024, 600.0)
    assert log.tokenizer.endswith("/fineweb_1024_bpe.model") and log.val_pattern.endswith("fineweb_val_*.bin")
    assert [s.step for s in log.steps] == [1, 200, 13_750] and [v.step for v in log.validations] == [0, 200, 13_780]
    assert (log.steps[1].train_loss, log.steps[1].train_time_ms, log.steps[1].step_avg_ms) == (Decimal("2.8041"), 8677.0, 43.38)
    assert log.validations[-1].step_avg_ms == 43.54 and log.warmup_steps == 20 and log.peak_memory_mib == 10_184
    assert (log.code_bytes, log.weight_bytes, log.total_bytes, log.raw_bytes) == (47_642, (15_815_847,), (15_863_489,), 67_224_983)
    assert (log.packed[0].scheme, log.packed[0].codec, log.packed[0].payload_bytes) == ("int8", "zlib", 17_178_912)
    assert [(f.name, f.val_bpb, f.eval_time_ms) for f in log.finals] == [
        ("final_int8_zlib_roundtrip", Decimal("1.2244"), 1401.0), ("final_int8_zlib_roundtrip_exact", Decimal("1.22436570"), None)]
    assert log.settings["matrix_lr"] == "0.04" and not log.unread and not log.contradictions and log.source is None


def test_second_dialect() -> None:
    log = parse_train_log(SECOND)
    assert (log.num_steps, log.seed, log.world_size, log.vocab_size, log.val_tokens) == (5025, 314, 8, 8192, 47_851_520)
    assert [(s.step, s.train_loss, s.train_time_ms, s.coarse) for s in log.steps][1] == (500, Decimal("2.7320"), 48_000.0, True)
    assert log.validations[-1].train_time_ms is None and log.stopped.train_time_ms == 599_675.0
    assert (log.code_bytes, log.weight_bytes, log.total_bytes) == (37_155, (15_905_033,), (15_942_188,))
    assert [f.name for f in log.diagnostics] == ["diagnostic pre-quantization post-ema"]
    assert [(f.name, f.val_bpb) for f in log.finals] == [("diagnostic quantized", Decimal("1.06924071"))]
    assert not log.unread and not log.contradictions


@pytest.mark.parametrize(("lines", "check"), [
    # 2026-03-19_BitNet158: another kind of artifact, and a total without a packing
    ("Code size: 53888 bytes\nTernary artifact: 15057568 bytes (lzma) = 15.06MB\nTotal submission size: 15111456 bytes = 15.11MB",
     lambda log: log.total_bytes == (15_111_456,) and log.weight_bytes == (15_057_568,) and log.packed[0].codec == "lzma"),
    # the MLX script
    ("serialized_model_int8_zlib:9354004 bytes (payload:13276256 raw_pickle:13279693 payload_ratio:3.86x)",
     lambda log: log.weight_bytes == (9_354_004,) and (log.packed[0].scheme, log.packed[0].codec) == ("int8", "zlib")),
    ("step:200/2000 train_loss:3.9162 train_time:88613ms step_avg:443.06ms tok_s:17427", lambda log: log.steps[0].step_avg_ms == 443.06),
    # 2026-02-22, bits per byte at the end of the line, every step logged to the last
    ("step:25860/25860 val_loss:2.2789 train_time:596608ms step_avg:23.07ms val_bpb:1.3319",
     lambda log: log.num_steps == 25_860 and log.validations[0].val_bpb == Decimal("1.3319")),
    # 2026-03-20_10L_4K_Sliding_TTT
    ("final_sliding_window val_loss:4.2362 val_bpb:2.5089 eval_time:322323ms stride:64 seq_len:4096",
     lambda log: log.finals[0].settings == {"stride": "64", "seq_len": "4096"} and log.finals[0].eval_time_ms == 322_323.0),
    ("final_sliding_window_eval_exact stride:64 val_loss:1.95946000 val_bpb:1.16050360",  # pull request 99
     lambda log: log.finals[0].name == "final_sliding_window_eval_exact" and log.finals[0].settings == {"stride": "64"}),
    ("ttt_sliding:done val_loss=1.932577 val_bpb=1.144584 elapsed=1046.1s",
     lambda log: log.finals[0] == Final("ttt_sliding:done", Decimal("1.932577"), Decimal("1.144584"), 1_046_100.0)),
    ("DIAGNOSTIC post_ema val_loss:1.9202 val_bpb:1.1373 eval_time:2227ms", lambda log: not log.finals and len(log.diagnostics) == 1),
    ("Total submission size int6+zstd22: 15,306,777 bytes", lambda log: log.total_bytes == (15_306_777,)),  # pull request 117
    ("quantized_ttt val_loss:2.79180191 val_bpb:1.08079352 eval_time:366525ms", lambda log: log.finals[0].val_bpb == Decimal("1.08079352")),
    ("Serialized model quantized+brotli: 15975300 bytes\nTotal submission size quantized+brotli: 15991930 bytes",
     lambda log: log.packed[0].codec == "brotli" and log.total_bytes == (15_991_930,)),
])
def test_dialects(lines: str, check) -> None:
    log = parse_train_log(lines + "\n")
    assert check(log), log
    assert not log.unread


@pytest.mark.parametrize("line", [
    "step:3350/20000 someone/parameter-golftrain_loss:2.2214 train_time:145628ms step_avg:43.47ms",  # stands so in a copy of the baseline's log
    "stopping_early: wallclock_cap train_time:~1046000ms step:~5300/20000",  # 2026-03-21_DepthRecurrence_5x3_640
    "step=1 mean_microbatch_loss=8.28510094 validation_loss=8.60875082 validation_bpb=9.93584169",  # 2026-03-18_psionic
    "val_bpb (pre-quant): 2.26",  # 2026-03-19_LoopedTransformer_LoRA_Int6
    "Artifact size: 1,960,000 bytes",
    "step:200/20000 train_loss:nan train_time:8677ms step_avg:43.38ms",
    "step:200/20000 train_loss:2.8041 train_time:8677 step_avg:43.38ms",
    "step:200/20000 train_loss:2.8041 train_loss:2.9 train_time:8677ms",
    "step:200/20000 val_bpb:1.5",
    "final_int8_zlib_roundtrip_exact val_loss:nan val_bpb:nan",
    "final_int8_zlib_roundtrip_exact val_loss:2.07 val_bpb:-1.2",
    "val_loss:2.0727 val_bpb:1.2244",
    "running val_loss:2.0727 val_bpb:1.2244",
    "Serialized model int8+zlib: 15.8 MB",
    "Total submission size int8+zlib: 15863,489 bytes",
    "final_int8 val_loss:2.0727, val_bpb:1.2244",
])
def test_what_is_not_understood_is_named_and_read_nowhere(line: str) -> None:
    log = parse_train_log(line + "\n")
    assert log.unread == (line,)
    assert log == TrainLog(unread=log.unread)


def test_lines_that_differ_in_their_numbers_are_one() -> None:
    log = parse_train_log("  ttt_chunk [1/1893] bpb=1.189547 time=0.7s\n  ttt_chunk [11/1893] bpb=1.147780 time=6.2s\n" * 3)
    assert log.unread == ("ttt_chunk [1/1893] bpb=1.189547 time=0.7s (and 5 more such lines)",)
    assert compact([]) == ()


@pytest.mark.parametrize(("old", "new", "says"), [
    ("seed:1337\n", "seed:1337\nseed:42\n", "seed is 1337 in one line and 42 in another"),
    ("train_time:8677ms", "train_time:608677ms", "the training time falls from 608677 ms at step 200"),
    ("val_bpb:1.22436570", "val_bpb:1.12436570", "does not follow from its val_loss 2.07269931"),
    ("val_loss:2.07269931 val_bpb:1.22436570", "val_loss:2.17269931 val_bpb:1.28344", "final_int8_zlib_roundtrip_exact has val_loss 2.17269931"),
    ("step:13780/20000\n", "step:13000/20000\n", "training stopped early at step 13,000, and step 13,780 is logged"),
    ("step:13750/20000 train_loss", "step:150/20000 train_loss", "steps go back from 200 to 150"),
])
def test_contradictions(old: str, new: str, says: str) -> None:
    assert old in BASELINE
    assert any(says in sentence for sentence in parse_train_log(BASELINE.replace(old, new)).contradictions)


def test_figures_that_contradict_each_other_are_none() -> None:
    log = parse_train_log(BASELINE.replace("seed:1337\n", "seed:1337\nmodel_params:1\nseed:42\nseed:1337\n"))
    assert log.seed is None and log.num_parameters is None
    two = parse_train_log(BASELINE + BASELINE.replace("2.8041", "2.8042"))
    assert two.num_runs == 2 and two.num_steps is None


def test_ranks_that_print_the_same_line_are_read_once() -> None:
    doubled = "".join(line + "\n" + line + "\n" for line in BASELINE.splitlines())
    assert parse_train_log(doubled) == parse_train_log(BASELINE)


@pytest.mark.parametrize(("text", "steps"), [
    ("step:200/20000 train_loss:2.8041 train_time:8677ms\n", None),  # a log that breaks off shows no end
    ("step:200/200 train_loss:2.8041 train_time:8677ms\n", 200),
    ("step:200/20000 val_loss:2.8 val_bpb:1.6 train_time:8677ms\n", None),
    ("step:200/20000 val_loss:2.8 val_bpb:1.6 train_time:8677ms\nSerialized model: 5 bytes\n", 200),
    ("step:200/20000 train_loss:2.8041 train_time:8677ms\nSerialized model: 5 bytes\n", None),
    ("", None),
])
def test_the_end_of_training_is_known_only_where_the_log_shows_it(text: str, steps: int | None) -> None:
    assert parse_train_log(text).num_steps == steps


RUN = """\
step:1/900 train_loss:5.5000 train_time:30ms step_avg:30.00ms
step:300/900 train_loss:3.1000 train_time:9000ms step_avg:30.00ms
step:640/900 val_loss:2.4000 val_bpb:1.4211 train_time:19200ms step_avg:30.00ms
stopping_early: wallclock_cap train_time:19200ms step:640/900
Serialized model: 900 bytes
"""  # no run's figures


RULE = "=" * 100


@pytest.mark.parametrize("between", ["", f"count = torch.zeros(())\n    total += float(count)\n\n{RULE}\nRunning Python 3.12\n{RULE}\n"])
def test_a_console_text_and_the_log_after_it_are_one_run(between: str) -> None:
    once, twice = parse_train_log(RUN), parse_train_log(RUN + between + RUN)
    assert (twice.steps, twice.validations, twice.num_steps, twice.num_runs) == (once.steps, once.validations, 640, 1) and not twice.contradictions
    for old, new in (("loss:3.1000", "loss:3.2000"), ("loss:5.5000", "loss:5.6000"), ("train_time:19200ms step_avg", "train_time:19300ms step_avg")):
        other = parse_train_log(RUN + between + RUN.replace(old, new))
        assert other.num_runs == 2 and other.num_steps is None, new


@pytest.mark.parametrize(("before", "line", "settings"), [
    ("final_eval_mode:sliding_window stride:32 batch_seqs:256", "final_x val_loss:2.0 val_bpb:1.2 eval_time:5ms",
     {"stride": "32", "batch_seqs": "256"}),
    ("final_eval_mode:sliding_window seq_len:512 stride:32", "final_x val_loss:2.0 val_bpb:1.2", {"seq_len": "512", "stride": "32"}),
    ("final_eval_mode:standard", "final_x val_loss:2.0 val_bpb:1.2", {}),
    ("eval_seq_len:512 (longer rotary base, 1025 tokens)", "final_x val_loss:2.0 val_bpb:1.2", {"eval_seq_len": "512"}),
    ("final_eval_mode:sliding_window stride:32", "final_x val_loss:2.0 val_bpb:1.2 stride:8", {"stride": "8"}),  # its own line says more
])
def test_what_a_line_announces_of_the_next_score(before: str, line: str, settings: dict[str, str]) -> None:
    log = parse_train_log(f"{RUN}{before}\n{line}\nfinal_x_exact val_loss:2.01 val_bpb:1.21\nlegal_y val_loss:2.0 val_bpb:1.2\n")
    first, exact, other = log.finals
    assert first.settings == settings and exact.settings.items() <= {**settings, "stride": "32"}.items() and other.settings == {}
    assert not log.unread


def test_windows_among_the_settings_are_no_scores_windows() -> None:
    log = parse_train_log("eval_seq_len:512 eval_stride:64\neval_seq_len:512\n" + RUN + "final_x val_loss:2.0 val_bpb:1.2\n")
    assert log.settings["eval_seq_len"] == "512" and log.finals[0].settings == {}


def test_steps_after_the_end_of_training_are_named() -> None:
    log = parse_train_log(RUN + "post_qat step:1 loss:2.1 elapsed:62ms\npost_qat step:2 loss:2.0 elapsed:99ms\npost_qat:done steps=2\n")
    assert log.unread == ("post_qat step:1 loss:2.1 elapsed:62ms (and 1 more such lines)",) and log.num_steps == 640


SCRIPT = 'import os\n\n\ndef main():\n'\
         '    log0(f"step:{step}/{n} val_loss:{loss:.4f} val_bpb:{bpb:.4f}")\n    # step:5/10 train_loss:9.9 train_time:1ms\n'


def test_the_embedded_source_is_kept_and_not_read() -> None:
    for rule in ("=" * 100, "=" * 60):
        log = parse_train_log(SCRIPT + "step:5/10 train_loss:9.9 train_time:1ms\n\n" + rule + "\nRunning Python 3.12\n" + rule + "\n" + BASELINE)
        assert log.source == SCRIPT + "step:5/10 train_loss:9.9 train_time:1ms\n"
        assert [s.step for s in log.steps] == [1, 200, 13_750] and not log.unread
    wrapped = 'import lzma as L,base64 as B;exec(L.decompress(B.b85decode("abc")))'
    assert parse_train_log(wrapped + "\n" + "=" * 100 + "\n" + BASELINE).source == wrapped
    assert parse_train_log(SCRIPT + BASELINE).source is None and not parse_train_log(SCRIPT + BASELINE).unread


def test_rules_and_ends_of_lines_of_other_systems() -> None:
    assert parse_train_log(BASELINE.replace("\n", "\r\n")) == parse_train_log(BASELINE)
    stamped = "".join(f"2026-03-18 14:38:18,123 {line}\n" for line in BASELINE.splitlines() if not line.startswith(("W0", "[", "NCCL")))
    assert parse_train_log(stamped).steps == parse_train_log(BASELINE).steps


@pytest.mark.parametrize(("text", "name"), [
    ("final_int6_sliding_window ", "final_int6_sliding_window"), ("legal_ttt ", "legal_ttt"), ("ttt_chunk ", None), ("step 100 ", None),
    ("best ", None), ("target ", None), ("final_int6_sliding_window_ngram9_exact ", "final_int6_sliding_window_ngram9_exact"), ("2026 ", None),
    ("epoch:3 final ", None), ("final_ttt epoch:3 ", None), ("", None),
])
def test_labels(text: str, name: str | None) -> None:
    found = label_of(text)
    assert (found[0] if found else None) == name


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def numbers_of(log: TrainLog) -> set[str]:
    rows = [*(s.train_loss for s in log.steps), *(v.val_loss for v in log.validations), *(v.val_bpb for v in log.validations)]
    rows += [x for f in (*log.finals, *log.diagnostics) for x in (f.val_loss, f.val_bpb)]
    rows += [x for row in (*log.steps, *log.validations) for x in (row.step, row.iterations)]
    rows += [*log.weight_bytes, *log.total_bytes, *(s.num_bytes for s in log.code), log.raw_bytes, log.seed, log.num_parameters, log.peak_memory_mib]
    return {str(value) for value in rows if value is not None}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(BASELINE) - 1), st.sampled_from(["", " ", ":", "9", "x", "\n", ".", "~", "="]), st.integers(0, 3)),
                max_size=6), st.sampled_from([BASELINE, SECOND]))
def test_every_number_read_stands_in_the_text(edits: list[tuple[int, str, int]], text: str) -> None:
    for place, what, removed in edits:
        text = text[:place] + what + text[place + removed:]
    standing = set(NUMBER.findall(text)) | {"".join(re.findall(r"\d", n)) for n in re.findall(r"\d{1,3}(?:,\d{3})+", text)}
    standing |= {str(int(n)) for n in standing if n.isdigit()}
    assert numbers_of(parse_train_log(text)) <= standing


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=400))
def test_any_text_is_read_without_an_error(text: str) -> None:
    log = parse_train_log(text)
    assert log.num_steps is None or str(log.num_steps) in text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(BASELINE.splitlines() + SECOND.splitlines() + SCRIPT.splitlines()), max_size=30))
def test_lines_in_any_order(lines: list[str]) -> None:
    log = parse_train_log("\n".join(lines))
    standing = set(NUMBER.findall("\n".join(lines)))
    assert numbers_of(log) <= standing | {str(int(n)) for n in standing if n.isdigit()}
