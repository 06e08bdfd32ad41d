#!/bin/bash
# Run 0a1b2c3d: each of its nodes does what node() says, below.
#SBATCH --job-name=gpt2-0a1b2c3d
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:2
#SBATCH --time=24:00:00
#SBATCH --cpus-per-task=2
#SBATCH --output=/shared/runs/0a1b2c3d/slurm.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@120
# shellcheck disable=SC1090,SC1091,SC2016,SC2317,SC2329 # values are literal; srun calls the functions
: "${WANDB_API_KEY:?export it first: its value is not shown}"
set -u
export folder=/shared/runs/0a1b2c3d restart="${SLURM_RESTART_COUNT:-0}"

# The nodes meet at the first one, on a port by the job's number, below the ephemeral ones.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "$hosts" > "$folder/hosts"
first=${hosts%%$'\n'*}
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export PET_NNODES="$SLURM_JOB_NUM_NODES" PET_MASTER_ADDR="${address:-$first}"
export PET_MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"

# A task has all CPUs that sbatch was asked for, which srun doesn't take from it; of a whole node all.
if [ -n "${SLURM_CPUS_PER_TASK-}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
else
  export SLURM_CPU_BIND=none
fi

# What an earlier start of this job has left counts no more.
for path in "$folder/code" "$folder"/node-*.end; do
  [ ! -e "$path" ] || : > "$path"
done

# On each node. The agent starts the ranks,
# does what files in $folder ask for, and writes there how the node has ended.
node() {
  export PET_NODE_RANK="$SLURM_NODEID"
  module load cuda
  ulimit -c 0
  local code name=gpt2-0a1b2c3d-node-"$SLURM_NODEID"
  LAUNCHER_IMAGE="$(docker image inspect '--format={{.RootFS.Layers}}' /shared/cpu.img 2> /dev/null)"
  export LAUNCHER_IMAGE
  # Root, as whom an engine may read, sees nothing of a user's disk by NFS.
  payload=$(mktemp -d) || return 121
  chmod 755 "$payload"
  cp -R -- /home/user/runs/.payloads/PAYLOAD/launcher "$payload/" || return 121
  devices=()
  [ ! -e /dev/infiniband ] || devices=(--device /dev/infiniband)
  trap : TERM
  python3 "$payload/launcher/agent/node.py" "$folder" "$restart" \
    --report "docker exec $name "'python3 /opt/launchpad/launcher/agent/start.py stall.stall' \
    --needs '/shared/save dir' /home/user/work/checkpoints/gpt2 -- \
    docker run --gpus "\"device=$CUDA_VISIBLE_DEVICES\"" "${devices[@]}" \
    --mount "type=bind,source=$payload/launcher,target=/opt/launchpad/launcher,readonly" --rm \
    --name "$name" --init --ipc host --network host --user 1000:100 --workdir /tmp \
    --security-opt no-new-privileges --ulimit memlock=-1 --ulimit stack=67108864 \
    --stop-timeout 610 --env 'A=b $c' --env HOME=/tmp \
    --env 'LAUNCHER_CLAIM=0a1b2c3d anew /checkpoints' --env LAUNCHER_PAYLOAD=PAYLOAD \
    --env PYTHONUNBUFFERED=1 --env USER=launcher --env WANDB_API_KEY --env PET_NNODES \
    --env PET_NODE_RANK --env PET_MASTER_ADDR --env PET_MASTER_PORT --env LAUNCHER_IMAGE \
    --mount 'type=bind,source=/shared/save dir,target=/checkpoints' \
    --mount type=bind,source=/home/user/work/checkpoints/gpt2,target=/checkpoints-from,readonly \
    --label 'megatron-launchpad.checkpoints=/shared/save dir' \
    --label megatron-launchpad.created=2025-01-02T03:04:05+00:00 \
    --label megatron-launchpad.gpus=2 --label megatron-launchpad.image=megatron:24.10 \
    --label megatron-launchpad.name=gpt2 --label megatron-launchpad.node=0 \
    --label megatron-launchpad.nodes=2 --label megatron-launchpad.payload=PAYLOAD \
    --label megatron-launchpad.processes=2 --label megatron-launchpad.stop_grace=610 \
    -- /shared/cpu.img python3 /opt/launchpad/launcher/agent/start.py runner \
    --processes-per-node 2 --grace 600 -- -m launcher.trainer.gpt --num-layers 12 \
    --hidden-size 768 --num-attention-heads 12 --seq-length 512 --max-position-embeddings 512 \
    --init-method-std 0.006 --make-vocab-size-divisible-by 128 --micro-batch-size 4 \
    --global-batch-size 16 --train-iters 1000 --lr 0.0001 --min-lr 1e-05 \
    --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta1 0.9 \
    --adam-beta2 0.95 --clip-grad 1.0 --fp16 --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1 --mock-data --split 949,50,1 --vocab-size 50257 \
    --save /checkpoints --load /checkpoints-from --save-interval 500 --exit-signal-handler \
    --log-interval 10 --eval-interval 50 --eval-iters 5 "$@"
  code=$?
  # The container outlives what has started it.
  docker rm --force "$name" > /dev/null 2>&1
  rm -r -- "$payload"
  return "$code"
}
export -f node

# A node that couldn't begin, as there is no container for it, can't tell the others: srun says so.
failures() {
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >&2
    [[ ! $line =~ ^srun:\ error:\ .*:\ tasks?\ [0-9,-]+:\  ]] || : > "$folder/failed-$restart"
  done
}

exec 4> >(failures)
listener=$!

# Slurm asks this script alone to stop ahead of the time limit, and so may scancel.
trap ': > "$folder/limit-$restart"' TERM
srun --kill-on-bad-exit=0 --open-mode=append \
  --output="$folder/node-%n.out" --error="$folder/node-%n.err" \
  bash -c node 2>&4 4>&- &
step=$!
until wait "$step"; code=$?; ! kill -0 "$step" 2> /dev/null; do :; done
exec 4>&-
wait "$listener"

# The launcher looks for this.
echo "$code" > "$folder/code"
exit "$code"
