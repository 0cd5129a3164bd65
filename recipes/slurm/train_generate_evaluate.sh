#!/usr/bin/env bash
# One job on one node that trains, samples from every checkpoint on held-out prompts, and judges what they say.
#
#   sbatch recipes/slurm/train_generate_evaluate.sh TRAIN.yml GENERATE.yml EVALUATE.yml [--train.key value ...]
#
# GENERATE.yml needs no run and no output_dir, EVALUATE.yml no generations and no output_dir: the job sets them. When its
# time is nearly over, or it is preempted, it is put back into the queue and goes on where it was: the training bit for
# bit, generation with the next completions, evaluation from what lies there.
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
usage="usage: sbatch recipes/slurm/train_generate_evaluate.sh TRAIN.yml GENERATE.yml EVALUATE.yml [--train.key value ...]"
config=${1:?$usage} generate=${2:?$usage} evaluate=${3:?$usage}
shift 3

# The job's number names the folder and the run: both stay the same when it is put back.
name=$(basename "$config" .yml)
output=${RESULTS:-results}/$SLURM_JOB_ID/$name
export WANDB_RUN_ID=${SLURM_JOB_ID}_$name WANDB_RESUME=allow
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

if [ ! -e "$output/final" ]; then
    # srun starts the ranks itself, so that signals reach them at once.
    # shellcheck disable=SC2016  # each task has values of its own
    srun --kill-on-bad-exit=1 bash -c '
        export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
        export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
        exec async-rlhf train "$@"
    ' task --config "$config" --train.output_dir "$output" --resume "$@"
fi
if [ ! -e "$output/final" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi

alone() {  # a command in one task; ended by a signal (128 + 15), it is for the next time
    local code=0
    srun --ntasks=1 --kill-on-bad-exit=1 async-rlhf "$@" || code=$?
    if [ "$code" -eq 143 ]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    [ "$code" -eq 0 ] || exit "$code"
}
alone generate --config "$generate" --run "$output" --output_dir "$output/generations"
alone evaluate --config "$evaluate" --generations "$output/generations" --output_dir "$output/evaluation"
