#!/usr/bin/env bash
# A sweep on a cluster: each task of a job array does its share of the runs on a GPU of its own.
#
#   sbatch --array=0-15 recipes/slurm/sweep.sh sweep.yml
#
# The tasks share the sweep's folder. A task that is preempted or killed leaves out what is done when it is put back, and
# goes on with the run that it was at from its last checkpoint (base.train.save_steps). When all are done,
# `async-rlhf sweep sweep.yml` makes table and picture; so does this, by a last job that waits for them:
#
#   sbatch --dependency=afterok:JOB recipes/slurm/sweep.sh sweep.yml
#SBATCH --job-name=async-rlhf-sweep
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.log
set -euo pipefail
config=${1:?usage: sbatch --array=0-15 recipes/slurm/sweep.sh SWEEP.yml [--key value ...]}
shift

share=()
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    share=(--share "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
fi
exec async-rlhf sweep "$config" "${share[@]}" "$@"
