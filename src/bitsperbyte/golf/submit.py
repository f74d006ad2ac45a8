"""`bpb golf submit`: the challenge's folder of a finished run, or of the same run under several seeds.

    README.md            generated from the records
    submission.json      the fields below
    train_seed<N>.log    train.log of each seed
    train_gpt.py         one script: trains, packs, scores; `--eval-only artifact.bpb` scores alone
    artifact.bpb         the artifact of one seed, the first
    tokenizer.model      (or tokenizer.json) the tokenizer of the artifact
    requirements.txt     only where the run's codec is not of the standard library

submission.json. The mean over the seeds is the headline; figures of the shipped artifact stand under `artifact`.

    author, github_id, name, blurb, date, track        strings, null where not given
    val_loss, val_bpb                                  mean over the seeds, of the artifacts read back from disk; nats a token, bits a byte
    val_loss_std, val_bpb_std                          sample standard deviation, null for one seed
    pre_quant_val_loss, pre_quant_val_bpb              mean over the seeds, before quantisation
    seeds                                              [1, 2, 3], in the order of seed_results
    seed_results                                       {"1": {val_loss, val_bpb, pre_quant_val_bpb, bytes_artifact, bytes_total,
                                                       artifact_sha256, step_stop, wallclock_seconds, num_resumes, log, record_sha256}}
    bytes_code, bytes_artifact, bytes_total            of this folder: train_gpt.py, artifact.bpb, their sum
    bytes_cap, bytes_margin                            the cap, and what is left under it
    code_form, code_sha256                             plain, minified or compressed; of train_gpt.py
    artifact                                           {file, seed, sha256, scheme, codec, val_loss, val_bpb}
    tokenizer                                          {file, name, sha256, vocab_size}
    evaluation                                         {window, stride, documents, drop_tail, num_tokens, num_bytes, bytes_per_token}
    data                                               {source, train_sha256, val_sha256, scored_split_sha256}
    step_stop, wallclock_seconds                       means over the seeds
    budget_seconds, within_budget                      null and null for a run without a clock
    num_parameters, train_tokens
    config_sha256, source_commit, source_dirty, bitsperbyte_version
    hardware, pytorch_version, python_version
"""
