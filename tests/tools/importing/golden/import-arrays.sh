#!/bin/bash
# Options in arrays, started by torchrun on one machine.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_DEBUG=INFO WANDB_API_KEY=abc123

GPUS=4            # on this node
NODES=1
WORLD=$(($GPUS*$NODES))
ROOT=/srv/train
TAG=tiny_WS${WORLD}
SAVE=${ROOT}/ckpt/$TAG
mkdir -p ${SAVE}
DATA=$1

DIST=(
    --nproc_per_node $GPUS
    --nnodes $NODES   # one
    --master_addr localhost
    --master_port ${MASTER_PORT:-6000}
)
MODEL=(
    --num-layers 4
    --hidden-size 256  # narrow
    --num-attention-heads 8
    # --swiglu
    --seq-length 1024
    --max-position-embeddings 1024
    --group-query-attention
    --num-query-groups 4
)
TRAINING=(
    --micro-batch-size 2
    --global-batch-size 16
    --train-iters 200
    --lr 1.5e-4
    --min-lr 1e-5
    --lr-warmup-fraction .01
    --bf16
    --recompute-granularity full
    --moe-aux-loss-coeff 1e-2
)
TRAINING+=(--tensor-model-parallel-size 2 --sequence-parallel)
if [ -n "$WANDB_PROJECT" ]; then
    TRAINING+=(--wandb-project $WANDB_PROJECT)
fi

torchrun ${DIST[@]} $ROOT/Megatron-LM/pretrain_gpt.py \
    ${MODEL[@]} \
    "${TRAINING[@]}" \
    --data-path 0.3 $DATA/a 0.7 $DATA/b \
    --vocab-file "$ROOT/a vocabulary.json" --merge-file $ROOT/merges.txt \
    --split 949,50,1 \
    --distributed-backend nccl \
    --save $SAVE --load $SAVE --save-interval 100 \
    --log-interval 10 2>&1 | tee $SAVE/log.txt \
    # ${MORE[@]}
