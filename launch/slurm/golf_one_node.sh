#!/usr/bin/env bash
#SBATCH --job-name=bpb-golf
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A golf run on the GPUs of one node:
#
#     sbatch launch/slurm/golf_one_node.sh configs/golf/baseline.yaml runs/baseline [--set data.path=data/fineweb ...]
#
# RUN_DIR must lie on a disk that outlives the job. TERM comes two minutes before the time limit: the run then writes a checkpoint and
# ends, which Slurm shows as a failed job. Submitted again, or requeued after a preemption, it goes on where it was.
set -euo pipefail
config=${1:?usage: sbatch golf_one_node.sh CONFIG RUN_DIR [options of bpb golf train]}
run_dir=${2:?usage: sbatch golf_one_node.sh CONFIG RUN_DIR [options of bpb golf train]}
shift 2

resume=()
if [[ -f "$run_dir/identity.json" ]]; then resume=(--resume); fi

export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun of 22.05 does not take it from the job; bound to cores, a task then has one
exec srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" -m torch.distributed.run --standalone \
  --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" -m bitsperbyte golf train "$config" --run-dir "$run_dir" "${resume[@]}" "$@"
