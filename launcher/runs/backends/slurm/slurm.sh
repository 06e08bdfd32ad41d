# The parts of a job's script: slurm_request.py puts together those that a plan asks for, with its words at
# each @name; a line that is one @name is any number of lines.
### head
## The nodes meet at the first one, on a port by the job's id, below the ephemeral ones
#!/bin/bash
@options
@secrets

set -u
folder=@folder
restart=@restart
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export folder restart PET_NNODES="$SLURM_JOB_NUM_NODES" PET_MASTER_ADDR="${address:-$first}"
export PET_MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"
for path in "$folder/code" "$folder"/node-*.end; do
  [ ! -e "$path" ] || : > "$path"
done
### node
## What a node does. Its end it tells itself, or what started its container and outlives that.
## It asks the program alone to stop: scancel's signals reach all processes, those that load the data
## too, without which nothing is saved. Once a node has failed, the others have time to fail by
## themselves before they are killed.

over() {
  local end="$folder/node-$SLURM_NODEID.end" told=
  [ "$1" -eq 0 ] || : > "$folder/failed-$restart"
  [ ! -e "$end" ] || read -r told < "$end"
  [ "$told" != begun ] || echo " $1 $(date +%s.%N)" >> "$end"
  return "$1"
}
node() {
  local rank="$SLURM_NODEID"
  local me="$folder/node-$rank" pid asked= question= answered= failed=0 code=0 path
  printf begun > "$me.end"
  for path in @paths; do
    [ -e "$path" ] && continue
    echo "launcher: there is no $path on $SLURMD_NODENAME: let it be on a disk that all see" >&2
    code=@unable
  done
  export PET_NODE_RANK="$rank"
@setup
  if [ "$code" -eq 0 ]; then
    @command &
  else
    (exit "$code") &
  fi
  pid=$!
  trap : TERM
  while kill -0 "$pid" 2>/dev/null; do
    if [ -z "$asked" ] && { [ -e "$folder/stop" ] || [ -e "$folder/limit-$restart" ]; }; then
      asked=1
      kill -TERM "$pid"
    elif [ -e "$folder/failed-$restart" ] && [ $((failed += 1)) -ge @settle ]; then
      @kill
    elif [ -e "$folder/ask" ] && read -r question < "$folder/ask" &&
      [ "$question" != "$answered" ]; then
      answered=$question
      { @report > "$me.part"; mv -f "$me.part" "$me.$question.tar"; } &
    fi
    sleep 0.5
  done
  { wait "$pid"; } 2>/dev/null
  code=$?
@tidy
  over "$code"
}
export -f over node
### start
## The nodes, and Slurm's signal ahead of the time limit. A node that Slurm couldn't begin, as pyxis has
## no container for it, can't tell the others: srun's word for it is looked for.

limit=
trap 'limit=1; : > "$folder/limit-$restart"' TERM
from=$(($(stat -c %s "$folder/slurm.out") + 1))
watch() {
  while kill -0 "$$" 2>/dev/null; do
    read -r -t 0.5 -u 3
    if tail -c "+$from" "$folder/slurm.out" | grep -Eq "^srun: error: .*: tasks? [0-9,-]+: "; then
      : > "$folder/failed-$restart"
      return
    fi
  done 3<> <(:)
}
watch &
watch=$!
@start &
step=$!
until wait "$step"; code=$?; ! kill -0 "$step" 2>/dev/null; do :; done
{ kill "$watch"; wait "$watch"; } 2>/dev/null
### again
## A job that its time limit has stopped starts again, or the next one of its array does
if [ -n "$limit" ] && [ "$code" -eq 0 ] && [ ! -e "$folder/stop" ]; then
  @again && exit 0
fi
### others
## Of a run that is over
scancel --quiet --state=PENDING "$SLURM_ARRAY_JOB_ID"
### end
## What the launcher looks for
echo "$code" > "$folder/code"
exit "$code"
### array
## Each task is a run with a script of its own
#!/bin/bash
@options
case $SLURM_ARRAY_TASK_ID in
@tasks
esac
