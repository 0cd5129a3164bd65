#!/usr/bin/env bash
# Several nodes: vLLM servers on all GPUs of the first, the learner's ranks on all GPUs of the others.
#
#   sbatch --nodes=3 recipes/slurm/several_nodes.sh recipes/tldr/online_dpo_410m.yml mnoukhov/pythia410m-sft-tldr \
#       --train.gradient_accumulation_steps 4
#
# The model is named for the servers, which read its architecture; weights come from the run, over the network.
# As one_node.sh it saves when its time is nearly over, is put back into the queue, and goes on; preempted without that
# warning, it goes on from its last checkpoint (save_steps).
#SBATCH --job-name=async-rlhf
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # newer versions of srun no longer take it from sbatch
usage="usage: sbatch --nodes=N recipes/slurm/several_nodes.sh CONFIG.yml MODEL [--key value ...]"
config=${1:?$usage}
model=${2:?$usage}
shift 2

name=$(basename "$config" .yml)
output=${RESULTS:-results}/$SLURM_JOB_ID/$name
export WANDB_RUN_ID=${SLURM_JOB_ID}_$name WANDB_RESUME=allow
per_node=${SLURM_NTASKS_PER_NODE:?}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
servers=${nodes[0]}
learners=$((${#nodes[@]} - 1))
MASTER_ADDR=${nodes[1]}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
FIRST_PORT=$((MASTER_PORT + 1))
export MASTER_ADDR MASTER_PORT FIRST_PORT
# Without it nobody is served beyond the host. Both srun hand it on; a key of your own is kept.
export ASYNC_RLHF_API_KEY=${ASYNC_RLHF_API_KEY:-$(openssl rand -hex 32)}

# shellcheck disable=SC2016  # each task has values of its own
srun --nodes=1 --ntasks="$per_node" --nodelist="$servers" bash -c '
    export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
    exec async-rlhf serve --host 0.0.0.0 --port $((FIRST_PORT + SLURM_LOCALID)) "$@"
' task --model "$model" &
serving=$!
trap 'kill "$serving" 2>/dev/null || true' EXIT

urls=()
for ((i = 0; i < per_node; i++)); do
    url=http://$servers:$((FIRST_PORT + i))
    urls+=("\"$url\"")
    until curl --silent --fail --max-time 5 "$url/health"; do
        kill -0 "$serving" 2>/dev/null || { echo "a server has ended; see above" >&2; exit 1; }
        sleep 5
    done
done

# shellcheck disable=SC2016
srun --nodes="$learners" --ntasks=$((learners * per_node)) --exclude="$servers" --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    exec async-rlhf train "$@"
' task --config "$config" --train.output_dir "$output" --resume --train.parallel.strategy fsdp \
    --train.generation.engine vllm --train.generation.placement server \
    --train.generation.urls "[$(IFS=,; echo "${urls[*]}")]" --train.generation.weights_transport network "$@" &
learner=$!
# The learner alone is told that time is nearly over: it still needs the servers for the batches under way.
trap 'scancel --signal=TERM "$SLURM_JOB_ID.1"' USR1
status=0
wait "$learner" || status=$?
while kill -0 "$learner" 2>/dev/null; do  # the signal has ended the waiting, not the learner
    status=0
    wait "$learner" || status=$?
done

if [ "$status" -eq 0 ] && [ ! -e "$output/final" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
