#!/usr/bin/env bash
#SBATCH --job-name=bpb-randopt
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A RandOpt run on one node:
#
#     sbatch launch/slurm/randopt_one_node.sh configs/randopt/smoke_1gpu_small.yaml runs/small [--set model.path=DIR ...]
#
# Every evaluated seed is one synced line of the journal, so a job that ends at any moment loses at most the seed it was at.
set -euo pipefail
config=${1:?usage: sbatch randopt_one_node.sh CONFIG RUN_DIR [options of bpb randopt run]}
run_dir=${2:?usage: sbatch randopt_one_node.sh CONFIG RUN_DIR [options of bpb randopt run]}
shift 2

resume=()
if [[ -f "$run_dir/identity.json" ]]; then resume=(--resume); fi

export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun of 22.05 does not take it from the job; bound to cores, a task then has one
exec srun --kill-on-bad-exit=1 "${BPB:-.venv/bin/bpb}" randopt run "$config" --run-dir "$run_dir" "${resume[@]}" "$@"
