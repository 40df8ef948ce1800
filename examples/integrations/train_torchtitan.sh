#!/bin/sh
# Trains a torchtitan model that saves and loads its checkpoints through vescale_ckpt: the last line is the difference.
# It needs GPUs, torchtitan 0.3 and the model's assets (scripts/download_hf_assets.py of torchtitan).
#
#     sh examples/integrations/train_torchtitan.sh FOLDER [more flags of torchtitan]
#
# Run it again after a kill: torchtitan goes on from the newest complete checkpoint in FOLDER/checkpoint.
set -eu
folder=$1
shift
exec torchrun --nproc-per-node="${GPUS:-8}" --local-ranks-filter=0 -m torchtitan.train \
    --module llama3 --config "${CONFIG:-llama3_8b}" --dump_folder "$folder" \
    --checkpoint.enable --checkpoint.interval 500 --checkpoint.async_mode async --checkpoint.keep_latest_k 3 \
    --override.imports vescale_ckpt.integrations.torchtitan.vescale "$@"
