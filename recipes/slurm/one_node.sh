#!/usr/bin/env bash
# One node: three ranks of the learner on a GPU each, the generator on the fourth.
#
#   sbatch recipes/slurm/one_node.sh recipes/tldr/online_dpo_410m.yml --train.gradient_accumulation_steps 21 \
#       --train.total_episodes 129024
#
# Five minutes before its time is over, and when it is preempted, the run saves and ends; the job is then put back into
# the queue under the same number, and goes on where it was, bit for bit (on GPUs with --train.deterministic true).
#SBATCH --job-name=async-rlhf
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=3
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # newer versions of srun no longer take it from sbatch
config=${1:?usage: sbatch recipes/slurm/one_node.sh CONFIG.yml [--key value ...]}
shift

# The job's number names the folder and the run: both stay the same when it is put back.
name=$(basename "$config" .yml)
output=${RESULTS:-results}/$SLURM_JOB_ID/$name
export WANDB_RUN_ID=${SLURM_JOB_ID}_$name WANDB_RESUME=allow
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# srun starts the ranks itself, so that signals reach them at once.
# shellcheck disable=SC2016  # each task has values of its own
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    exec async-rlhf train "$@"
' task --config "$config" --train.output_dir "$output" --resume "$@"

if [ ! -e "$output/final" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
