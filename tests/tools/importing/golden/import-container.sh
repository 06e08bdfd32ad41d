IMAGE=nvcr.io/nvidia/pytorch:24.09-py3
HERE=$PWD/out
CUDA_VISIBLE_DEVICES=0,1
sudo docker run --rm -it --gpus '"device=0,1"' --ipc=host --ulimit stack=67108864 --shm-size 16g \
    -v /home/me/corpus:/data:ro -v $HERE:/out -v /home/me/extra:/extra \
    -e NCCL_P2P_DISABLE=1 -e HF_TOKEN --privileged $IMAGE \
    bash -c "cd /workspace/Megatron-LM && torchrun --nproc_per_node 2 pretrain_bert.py \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --max-position-embeddings 128 --micro-batch-size 1 --train-iters 10 --lr 1e-4 \
        --data-path /data/text_sentence --vocab-file /data/vocab.txt \
        --save /out/ckpt --bert-no-binary-head --titles-data-path /extra/titles"
