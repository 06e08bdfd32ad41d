#!/bin/sh
#SBATCH --nodes=2
NNODES=2
RANK_HERE=${SLURM_NODEID:-0}
VOCAB=<your vocabulary>/vocab.json
NOW=`date +%F`
cd /somewhere

DISTRIBUTED_ARGS="
    --nproc_per_node=8 \
    --nnodes=$NNODES \
    --node_rank=$RANK_HERE \
    --master_addr=$HEAD \
    --log_dir logs
"
GPT_ARGS="
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 512 \
    --max-position-embeddings 512 \
    --micro-batch-size 4 \
    --train-iters 1000 \
    --train-iters 2000 \
    --lr 0.00015 \
    --fp16 \
    --no-such-option 3 \
    --attention-backend flash
"
case $SIZE in
    big) EXTRA_ARGS="--swiglu" ;;
esac
options=" --split '99,1,0' --wandb-exp-name run-$NOW --optimizer sgd"

python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py \
    $GPT_ARGS $EXTRA_ARGS $options \
    --data-path $DATA --vocab-file $VOCAB --mock-data
pip install something
