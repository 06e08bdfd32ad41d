"""The models of a run file: strict, so that a typo is a message and not a wasted night.

Keys of the sections model, training, parallel, data, checkpoint and logging are the training
program's argument names, with underscores. What has no field here goes under megatron_args.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_serializer, model_validator

from launcher.runs.payload import PYTHON
from launcher.runs.runfile.clusters import Kubernetes, Slurm
from launcher.runs.runfile.values import (
    Device,
    Extra,
    Flag,
    Fraction,
    GpuRequest,
    Matching,
    MicroBatch,
    Name,
    NotNegative,
    OneScalar,
    Positive,
    Prefixes,
    Reference,
    Scalars,
    Shares,
    Size,
    Steps,
    Strict,
    Tag,
    Text,
    Texts,
    Variable,
    Whole,
)


class Image(Strict):
    """The image: a row of the matrix by its tag, or any image by its full name.

    `extras` are packages and named sets of the matrix that it was built with beside the row's own.
    """

    tag: Tag | None = None
    name: Reference | None = None
    megatron: Annotated[Text, Matching(r"\d+\.\d+\.\d+[\w.+-]*", 'a release: "0.9.0"')] | None = (
        None
    )
    extras: list[Extra] = Field(default_factory=list)
    python: Annotated[Text, Matching(r"[\w./+-]+", "a program: /opt/venv/bin/python")] = PYTHON

    @model_validator(mode="before")
    @classmethod
    def spelled_out(cls, value: Any) -> Any:
        """`image: "24.10"` for `image: {tag: "24.10"}`, and a name where it has a / or a :."""
        if isinstance(value, str) and re.search("[/:@]", value):
            return {"name": value}
        return {"tag": value} if isinstance(value, str | float) else value

    @model_validator(mode="after")
    def _one(self) -> Image:
        if (self.tag is None) == (self.name is None):
            raise ValueError("give a tag of the matrix or the full name of an image, one of both")
        if self.name and self.extras:
            raise ValueError("extras are of a tag of the matrix: another image has what it has")
        return self


class Megatron(Strict):
    """What the Megatron at hand is taken for: `as`, a series that is described."""

    model_config = ConfigDict(**Strict.model_config, populate_by_name=True)

    as_: Annotated[Text, Matching(r"\d+\.\d+", 'a series: "0.19"')] = Field(alias="as")

    @model_serializer
    def _written(self) -> dict[str, str]:
        return {"as": self.as_}


class Model(Strict):
    """The shape of the model."""

    num_layers: Positive | None = None
    hidden_size: Positive | None = None
    ffn_hidden_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_query_groups: Positive | None = None
    kv_channels: Positive | None = None
    seq_length: Positive | None = None
    max_position_embeddings: Positive | None = None
    position_embedding_type: Text | None = None
    rotary_base: Positive | None = None
    normalization: Text | None = None
    norm_epsilon: NotNegative | None = None
    swiglu: Flag | None = None
    disable_bias_linear: Flag | None = None
    untie_embeddings_and_output_weights: Flag | None = None
    init_method_std: NotNegative | None = None
    hidden_dropout: Fraction | None = None
    attention_dropout: Fraction | None = None
    make_vocab_size_divisible_by: Positive | None = None
    attention_backend: Text | None = None
    transformer_impl: Text | None = None


class Training(Strict):
    """Batches, steps, optimizer and precision.

    `precision` is another way to write fp16 and bf16, of which either counts more than `auto`.
    """

    micro_batch_size: MicroBatch | None = None
    global_batch_size: Positive | None = None
    rampup_batch_size: Annotated[list[Positive], Field(min_length=3, max_length=3)] | None = None
    train_iters: Positive | None = None
    train_samples: Positive | None = None
    optimizer: Text | None = None
    lr: NotNegative | None = None
    min_lr: NotNegative | None = None
    lr_decay_style: Text | None = None
    lr_decay_iters: Positive | None = None
    lr_decay_samples: Positive | None = None
    lr_warmup_fraction: Fraction | None = None
    lr_warmup_iters: Whole | None = None
    lr_warmup_samples: Whole | None = None
    weight_decay: NotNegative | None = None
    adam_beta1: Fraction | None = None
    adam_beta2: Fraction | None = None
    adam_eps: NotNegative | None = None
    clip_grad: NotNegative | None = None
    precision: Literal["auto", "bf16", "fp16", "fp32"] | None = None
    fp16: Flag | None = None
    bf16: Flag | None = None
    seed: Whole | None = None

    @model_validator(mode="after")
    def _one_precision(self) -> Training:
        given = [name for name in ("fp16", "bf16") if getattr(self, name)]
        if given and self.precision not in (None, "auto", *given):
            raise ValueError(f"precision is {self.precision} and {given[0]} is set: keep one")
        return self


class Parallel(Strict):
    """How the model is spread over the processes."""

    tensor_model_parallel_size: Positive | None = None
    pipeline_model_parallel_size: Positive | None = None
    context_parallel_size: Positive | None = None
    expert_model_parallel_size: Positive | None = None
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    sequence_parallel: Flag | None = None
    use_distributed_optimizer: Flag | None = None
    overlap_grad_reduce: Flag | None = None
    overlap_param_gather: Flag | None = None


class Data(Strict):
    """What is trained on: `path` is the prefix of a .bin and .idx, or weights and prefixes.

    `text` are files to make them of before the start, `text_key` the key or column with the text.
    `mock` asks for made-up tokens where no path is given; `vocab_size` counts the end-of-document
    token; `cache` is a folder for Megatron's index of the data.
    """

    path: Prefixes | None = None
    text: Texts | None = None
    text_key: Text | None = None
    mock: Flag = False
    split: Shares | None = None
    cache: Text | None = None
    vocab_size: Positive | None = None
    vocab_file: Text | None = None
    merge_file: Text | None = None
    tokenizer_type: Text | None = None
    tokenizer_model: Text | None = None
    num_workers: Whole | None = None


class Checkpoint(Strict):
    """Where checkpoints go and come from: folders, from where the launcher is started.

    `keep` is how many complete ones stay, the newest; with `save_overwrite` the run may save
    among another run's, over those of an equal iteration; `exit_signal_handler` saves when the run
    is asked to stop, as it does unless told otherwise wherever there is a folder to save to.
    """

    save: Text | None = None
    load: Text | None = None
    save_interval: Positive | None = None
    keep: Positive | None = None
    save_overwrite: Flag | None = None
    exit_signal_handler: Flag | None = None
    no_load_optim: Flag | None = None
    no_load_rng: Flag | None = None
    finetune: Flag | None = None


class Logging(Strict):
    """What is told during the run, to whom, and how often.

    A project of Weights & Biases gets the run under `wandb_exp_name`, or else the run's name.
    """

    log_interval: Positive | None = None
    eval_interval: Positive | None = None
    eval_iters: Whole | None = None
    tensorboard_dir: Text | None = None
    tensorboard_log_interval: Positive | None = None
    wandb_project: Text | None = None
    wandb_exp_name: Text | None = None
    wandb_save_dir: Text | None = None
    log_throughput: Flag | None = None
    check_replicas_interval: Positive | None = None


class MountSpec(Strict):
    """A folder or file of the host that the program sees at `target`."""

    source: Text
    target: Annotated[Text, Matching(r"/.+", "an absolute path: /data")]
    read_only: Flag = True


class Resources(Strict):
    """What the container is given; the defaults are what NVIDIA's images ask for.

    `ipc` not given is the host's for several processes with GPUs, and else private, with room.
    `devices` not given are InfiniBand's for several nodes, where a node has them: /dev/infiniband.
    """

    ipc: Literal["host", "private", "shareable"] | None = None
    shm_size: Size | None = None
    memory: Size | None = None
    ulimits: dict[Text, Annotated[int, Field(strict=True, ge=-1)]] | None = None
    network: Text | None = None
    devices: list[Device] | None = None
    cap_add: list[Annotated[Text, Matching("[A-Z_]+", "a capability: IPC_LOCK")]] = Field(
        default_factory=list
    )
    user: Annotated[Text, Matching(r"\d+(:\d+)?|auto|image", "auto, image or 1000:1000")] = "auto"
    no_new_privileges: Flag = True
    workdir: Text | None = None
    stop_grace: Whole = 600

    @model_validator(mode="after")
    def _shared_memory(self) -> Resources:
        if self.shm_size and self.ipc in (None, "host"):
            raise ValueError("shm_size has no effect with ipc: host; write ipc: private with it")
        return self


class Nodes(Strict):
    """Several machines: this one's number, and where the first one is reached.

    Where one launcher starts all of them, the count says it all. `min` is how few will do where
    some don't come, or come again after a failure. `spare` are more nodes that Slurm is asked for:
    of all, those take part that pass the look before the start.
    """

    count: Positive = 1
    min: Positive | None = None
    spare: Whole = 0
    rank: Whole = 0
    master_addr: Text | None = None
    master_port: Annotated[int, Field(strict=True, gt=0, lt=65536)] = 29500

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """`nodes: 16` for `nodes: {count: 16}`."""
        return {"count": value} if isinstance(value, int) else value

    @model_validator(mode="after")
    def _reachable(self) -> Nodes:
        if self.rank >= self.count:
            raise ValueError(f"rank {self.rank} isn't one of {self.count} nodes, 0 the first")
        if self.min and self.min > self.count:
            raise ValueError(f"min {self.min} is more than all {self.count} nodes")
        if self.spare and (self.min or self.count == 1):
            raise ValueError("spare goes with several nodes, and without min")
        return self


class Watchdog(Strict):
    """What is done about a run that writes nothing for `timeout` seconds; 0 is for nothing.

    It is told which rank waits where; then the run is kept as it is, or ended.
    """

    timeout: Whole = 1800
    action: Literal["keep", "end"] = "keep"


class Guard(Strict):
    """What is done where a run's numbers go wrong: it is told, ended, or goes back to a checkpoint.

    A spike is a loss or a gradient's norm more than `threshold` deviations above the last `window`
    lines of the log. It goes back `max_rewinds` times at most, each time past other batches.
    """

    on_nan: Literal["ignore", "warn", "end", "rewind"] = "warn"
    on_spike: Literal["ignore", "warn", "end", "rewind"] = "warn"
    on_flat: Literal["ignore", "warn", "end"] = "warn"
    window: Annotated[int, Field(strict=True, ge=20, le=10_000)] = 50
    threshold: NotNegative = 8.0
    max_rewinds: Whole = 3

    @property
    def goes_back(self) -> bool:
        """Whether it ever does."""
        return "rewind" in (self.on_nan, self.on_spike)


class Profile(Strict):
    """What is traced of a run: its steps from one number to another, on some ranks, by a tool.

    Traces go to `folder`, or else to the run's own.
    """

    steps: Steps
    tool: Literal["torch", "nsys"] = "torch"
    ranks: Annotated[list[Whole], Field(min_length=1)] = Field(default_factory=lambda: [0])
    folder: Text | None = None

    @property
    def first(self) -> int:
        """The first step's number."""
        return int(self.steps.partition("-")[0])

    @property
    def last(self) -> int:
        """The last step's number."""
        return int(self.steps.partition("-")[2])


class RunConfig(Strict):
    """A run file.

    `source` is a Megatron-LM checkout of this machine, used in place of the image's Megatron;
    `secrets` maps variables to files that hold their values; `max_restarts` is how often a run
    that failed is started again from its newest complete checkpoint.
    """

    name: Name
    image: Image
    program: Text = "gpt"
    source: Text | None = None
    model: Model = Field(default_factory=Model.model_construct)
    training: Training = Field(default_factory=Training.model_construct)
    parallel: Parallel = Field(default_factory=Parallel.model_construct)
    data: Data = Field(default_factory=Data.model_construct)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.model_construct)
    logging: Logging = Field(default_factory=Logging.model_construct)
    megatron: Megatron | None = None
    megatron_args: dict[Text, Scalars | None] = Field(default_factory=dict)
    gpus: GpuRequest = "1"
    processes: Positive = 1
    nodes: Nodes = Field(default_factory=Nodes.model_construct)
    slurm: Slurm = Field(default_factory=Slurm.model_construct)
    kubernetes: Kubernetes = Field(default_factory=Kubernetes.model_construct)
    env: dict[Variable, OneScalar | None] = Field(default_factory=dict)
    secrets: dict[Variable, Text] = Field(default_factory=dict)
    mounts: list[MountSpec] = Field(default_factory=list)
    max_restarts: Whole = 0
    watchdog: Watchdog = Field(default_factory=Watchdog.model_construct)
    guard: Guard = Field(default_factory=Guard.model_construct)
    profile: Profile | None = None
    resources: Resources = Field(default_factory=Resources.model_construct)
