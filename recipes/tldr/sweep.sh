#!/usr/bin/env bash
# One training run and its evaluation for each value of N, K, T or S, one after the other.
#
#   recipes/tldr/sweep.sh N "1 2 4 8 16 32 64" online_dpo_410m --train.staleness 0 [--key value ...]
#   recipes/tldr/sweep.sh K "2 4" online_dpo_410m
#   recipes/tldr/sweep.sh T "1 2 3" online_dpo_410m
#   recipes/tldr/sweep.sh S "0 1 2 4" online_dpo_410m
#
# Results go to runs/tldr/<recipe>_<letter><value> and .../evaluation. What is done is skipped; a run that was killed goes on.
# DRY_RUN=1 prints the configurations and runs nothing. TRAIN says how training is started, where not by async-rlhf alone:
#   TRAIN="torchrun --nproc-per-node 3 -m async_rlhf.cli" recipes/tldr/sweep.sh S "0 1" online_dpo_2.8b \
#       --train.generation.placement process
set -euo pipefail
usage='usage: recipes/tldr/sweep.sh N|K|T|S "1 2 4" RECIPE [--key value ...]'
letter=${1:?$usage}
values=${2:?$usage}
recipe=${3:?$usage}
shift 3
case $letter in
    N) key=num_mini_batches ;;
    K) key=samples_per_prompt ;;
    T) key=num_epochs ;;
    S) key=staleness ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
folder=$(cd "$(dirname "$0")" && pwd)
model=$(sed -n 's/^model: //p' "$folder/$recipe.yml")

for value in $values; do
    output=runs/tldr/${recipe}_$letter$value
    # shellcheck disable=SC2206  # several words
    train=(${TRAIN:-async-rlhf} train --config "$folder/$recipe.yml" "$@" "--train.$key" "$value"
        --train.output_dir "$output" --resume)
    evaluate=(async-rlhf evaluate --config "$folder/evaluate.yml" --run "$output" --models "{sft: $model}"
        --ref_model "$model" --output_dir "$output/evaluation")
    if [ -n "${DRY_RUN:-}" ]; then
        "${train[@]}" --dry-run
        "${evaluate[@]}" --dry-run
    else
        "${train[@]}"
        "${evaluate[@]}"
    fi
done
