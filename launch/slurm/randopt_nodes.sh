#!/usr/bin/env bash
#SBATCH --job-name=bpb-randopt-nodes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A RandOpt run over several nodes: a Ray cluster of the job's nodes, and the search on the first of them. As many workers as the GPUs
# have room for share one population; a node that is lost gives its seeds back.
#
#     sbatch --nodes=4 launch/slurm/randopt_nodes.sh configs/randopt/standard_8xh100_qwen72b.yaml runs/standard [--set model.path=DIR ...]
#
# The model must lie where every node finds it; RUN_DIR is written by the first node alone. Before the time limit TERM comes to this script
# alone, which passes it to the search: were it sent to all steps, Ray would be gone before the search has ended.
set -euo pipefail
config=${1:?usage: sbatch randopt_nodes.sh CONFIG RUN_DIR [options of bpb randopt run]}
run_dir=${2:?usage: sbatch randopt_nodes.sh CONFIG RUN_DIR [options of bpb randopt run]}
shift 2

export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun of 22.05 does not take it from the job; bound to cores, a task then has one
bin=${BIN:-.venv/bin}
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address="$first:${PORT:-6379}"
# Whoever reaches Ray's port may run code: a token of this job keeps others out. Left to itself, Ray asks for one on some nodes and not on others.
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

srun --nodes=1 --ntasks=1 --nodelist="$first" --overlap "$bin/ray" start --head --port="${PORT:-6379}" --include-dashboard=false \
  --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats --block &
head=$!
until (exec 3<>"/dev/tcp/$first/${PORT:-6379}") 2>/dev/null; do
  if ! kill -0 "$head" 2>/dev/null; then echo "Ray's head has ended, as said above (PORT taken, or in 10002-19999?)" >&2; exit 1; fi
  sleep 1
done
if (( SLURM_NNODES > 1 )); then
  srun --nodes=$(( SLURM_NNODES - 1 )) --ntasks=$(( SLURM_NNODES - 1 )) --exclude="$first" --overlap "$bin/ray" start --address="$address" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats --block &
fi

resume=()
if [[ -f "$run_dir/identity.json" ]]; then resume=(--resume); fi

# without srun, which would answer TERM by killing the search; this script is on the first node anyway
"$bin/bpb" randopt run "$config" --run-dir "$run_dir" \
  --set workers.count=null --set "workers.address=$address" "${resume[@]}" "$@" &
search=$!
trap 'kill -TERM "$search"' TERM
status=0
wait "$search" || status=$?
while kill -0 "$search" 2>/dev/null; do status=0; wait "$search" || status=$?; done  # TERM ends a wait, not the search
jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true
exit "$status"
