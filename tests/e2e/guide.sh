# The command lines of the training guide. Before each: its name, then of the same made small
# TP PP DP and how many losses it prints.

#: torch.distributed.launch 2 1 1 10
python -m torch.distributed.launch --nproc_per_node=2 \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 \
    --pipeline-model-parallel-size=1

#: torchrun 1 2 1 10
torchrun --nproc_per_node=2 \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=1 \
    --pipeline-model-parallel-size=2

#: tensor 2 1 2 9
torchrun --nproc_per_node=8 \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 \
    --pipeline-model-parallel-size=1 \
    --batch-size=16 \
    --epochs=3 \
    --train-steps=1000 \
    --sequence-parallel \
    --fp16

#: pipeline 1 2 2 9
torchrun --nproc_per_node=8 \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=1 \
    --pipeline-model-parallel-size=2 \
    --batch-size=16 \
    --epochs=3 \
    --train-steps=1000 \
    --fp16

#: hybrid 2 2 1 9
torchrun --nproc_per_node=8 \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 \
    --pipeline-model-parallel-size=2 \
    --batch-size=16 \
    --epochs=3 \
    --train-steps=1000 \
    --sequence-parallel \
    --fp16

#: small 2 1 1 10
torchrun --nproc_per_node=2 \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 \
    --pipeline-model-parallel-size=1 \
    --num-layers=2 \
    --hidden-size=128 \
    --num-attention-heads=4 \
    --batch-size=4 \
    --train-steps=10 \
    --dataset-size=100 \
    --monitor-memory-continuously

#: tips 1 1 2 10
torchrun --nproc_per_node=2 megatron_core_training_example.py \
    --monitor-memory-continuously --memory-monitor-interval=0.5 \
    --seq-length=128 --batch-size=4

#: nodes 2 2 1 9
(
torchrun --nproc_per_node=4 --nnodes=2 --node_rank=1 --master_addr=MASTER_IP --master_port=MASTER_PORT \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 \
    --pipeline-model-parallel-size=2 \
    --batch-size=16 \
    --epochs=3 \
    --train-steps=1000 \
    --init-method=tcp://MASTER_IP:MASTER_PORT \
    --world-size=8 \
    --fp16
) &
torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=MASTER_IP --master_port=MASTER_PORT \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 \
    --pipeline-model-parallel-size=2 \
    --batch-size=16 \
    --epochs=3 \
    --train-steps=1000 \
    --init-method=tcp://MASTER_IP:MASTER_PORT \
    --world-size=8 \
    --fp16
first=$?; wait $! && (exit $first)

#: slurm 2 2 1 9
SLURM_JOB_ID=1 SLURM_NNODES=2 SLURM_JOB_NODELIST='node[0-1]'
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=29500
GPUS_PER_NODE=4
NNODES=$SLURM_NNODES
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))
srun --jobid $SLURM_JOBID bash -c "
    torchrun --nproc_per_node=$GPUS_PER_NODE \
        --nnodes=$NNODES \
        --node_rank=\$SLURM_PROCID \
        --master_addr=$MASTER_ADDR \
        --master_port=$MASTER_PORT \
        megatron_core_training_example.py \
        --tensor-model-parallel-size=2 \
        --pipeline-model-parallel-size=2 \
        --batch-size=16 \
        --epochs=3 \
        --train-steps=1000 \
        --init-method=tcp://$MASTER_ADDR:$MASTER_PORT \
        --world-size=$WORLD_SIZE \
        --fp16
"

#: alone 1 1 1 10
CUDA_VISIBLE_DEVICES=0 python megatron_core_training_example.py \
    --tensor-model-parallel-size=1 --pipeline-model-parallel-size=1

#: connectivity 2 1 2 10
(
torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 --master_addr=MASTER_IP --master_port=MASTER_PORT \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 --pipeline-model-parallel-size=1 \
    --num-layers=2 --hidden-size=128 --train-steps=10 --batch-size=4
) &
torchrun --nproc_per_node=2 --nnodes=2 --node_rank=0 --master_addr=MASTER_IP --master_port=MASTER_PORT \
    megatron_core_training_example.py \
    --tensor-model-parallel-size=2 --pipeline-model-parallel-size=1 \
    --num-layers=2 --hidden-size=128 --train-steps=10 --batch-size=4
first=$?; wait $! && (exit $first)
