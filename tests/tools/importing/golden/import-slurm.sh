#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2               # two machines
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH -t 12:00:00

MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=29500
NNODES=$SLURM_NNODES
GLOBAL_BATCH=$((4 * $NNODES * 8))
DATA=${1:-/corpus}/text_document

srun --jobid $SLURM_JOBID bash -lc "
    cd /workspace/Megatron-LM
    torchrun --nproc_per_node=4 --nnodes=$NNODES --node_rank=\$SLURM_PROCID \
        --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \
        pretrain_gpt.py \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size $GLOBAL_BATCH \
        --train-iters 10 --lr 1e-4 --tensor-model-parallel-size 4 \
        --data-path '$DATA' --vocab-file ${VOCAB}/vocab.json --merge-file '$MERGES'
"
