CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node 2 --standalone --max-restarts=3 \
    my/train.py --tensor-model-parallel-size=2 --epochs=3 --name 'two words' --on true --id 0012
