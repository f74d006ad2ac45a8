#!/usr/bin/env bash
#SBATCH --job-name=bpb-golf-nodes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A golf run over several nodes, one torchrun on each, joined by a rendezvous on the first:
#
#     sbatch --nodes=2 launch/slurm/golf_nodes.sh configs/golf/baseline.yaml runs/baseline [--set data.path=data/fineweb ...]
#
# RUN_DIR and the data must lie on a disk that all nodes see: rank 0 writes, and after a requeue every rank reads the checkpoint.
set -euo pipefail
config=${1:?usage: sbatch golf_nodes.sh CONFIG RUN_DIR [options of bpb golf train]}
run_dir=${2:?usage: sbatch golf_nodes.sh CONFIG RUN_DIR [options of bpb golf train]}
shift 2

resume=()
if [[ -f "$run_dir/identity.json" ]]; then resume=(--resume); fi
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun of 22.05 does not take it from the job; bound to cores, a task then has one
exec srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
  --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:${PORT:-29500}" \
  -m bitsperbyte golf train "$config" --run-dir "$run_dir" "${resume[@]}" "$@"
