#!/bin/bash
# Run 0a1b2c3d: each of its nodes does what node() says, below.
#SBATCH --job-name=gpt2-0a1b2c3d
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --array=0-9%1
#SBATCH --cpus-per-task=2
#SBATCH --output=/shared/runs/0a1b2c3d/slurm.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@120
#SBATCH --mail-user='a b'
# No time limit is set (slurm.time): that of the partition counts.
# shellcheck disable=SC1090,SC1091,SC2016,SC2317,SC2329 # values are literal; srun calls the functions
: "${WANDB_API_KEY:?export it first: its value is not shown}"
set -u
export folder=/shared/runs/0a1b2c3d restart="$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))"

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

# On each node, outside of the container: a signal of scancel's reaches all processes.
outside() {
  trap : TERM
  module load cuda
  ulimit -c 0
  unset PYTHONPATH PYTHONHOME
  apptainer exec --nv --pwd=/tmp \
    '--mount=type=bind,source=/shared/save dir,target=/checkpoints' \
    --mount=type=bind,source=/home/user/work/checkpoints/gpt2,target=/checkpoints-from,readonly \
    --mount=type=bind,source=/home/user/runs/.payloads/PAYLOAD/launcher,target=/opt/launchpad/launcher,readonly \
    --bind="$folder" /shared/cpu.img bash -c node
}

# On each node, in its container. The agent starts the ranks,
# does what files in $folder ask for, and writes there how the node has ended.
node() {
  export PET_NODE_RANK="$SLURM_NODEID"
  export PYTHONNOUSERSITE=1
  export A='b $c'
  export HOME=/tmp
  export LAUNCHER_CLAIM='0a1b2c3d anew /checkpoints'
  export LAUNCHER_PAYLOAD=PAYLOAD
  export PYTHONUNBUFFERED=1
  export USER=launcher
  # A job that starts again goes on from what it saved.
  [ "$restart" -eq 0 ] || set -- --load /checkpoints
  exec python3 /opt/launchpad/launcher/agent/start.py node "$folder" "$restart" \
    -- \
    python3 /opt/launchpad/launcher/agent/start.py runner --processes-per-node 2 --grace 600 -- \
    -m launcher.trainer.gpt --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
    --seq-length 512 --max-position-embeddings 512 --init-method-std 0.006 \
    --make-vocab-size-divisible-by 128 --micro-batch-size 4 --global-batch-size 16 \
    --train-iters 1000 --lr 0.0001 --min-lr 1e-05 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 \
    --clip-grad 1.0 --fp16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 \
    --mock-data --split 949,50,1 --vocab-size 50257 --save /checkpoints \
    --load /checkpoints-from --save-interval 500 --exit-signal-handler --log-interval 10 \
    --eval-interval 50 --eval-iters 5 "$@"
}
export -f outside node

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
  bash -c outside 2>&4 4>&- &
step=$!
until wait "$step"; code=$?; ! kill -0 "$step" 2> /dev/null; do :; done
exec 4>&-
wait "$listener"

# At its time limit the job starts again, or the next one of its array does. The signal may come before
# the program handles it, and ends it (143): then too, but not twice in a row.
limit="$folder/limit-$restart"
if [ "$code" -eq 143 ] && [ -e "$limit" ] && [ ! -s "$folder/limit-$((restart - 1))" ]; then
  echo early > "$limit"
fi
if [ -e "$limit" ] && { [ "$code" -eq 0 ] || [ -s "$limit" ]; } && [ ! -e "$folder/stop" ]; then
  [ "$SLURM_ARRAY_TASK_ID" -lt "$SLURM_ARRAY_TASK_MAX" ] && exit 0
fi
# Of a run that is over nothing is left in the queue.
scancel --quiet --state=PENDING "$SLURM_ARRAY_JOB_ID"

# The launcher looks for this.
echo "$code" > "$folder/code"
exit "$code"
