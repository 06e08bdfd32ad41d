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
    MicroBatch,
    Name,
    NotNegative,
    OneScalar,
    Positive,
    Prefixes,
    Reference,
    Regex,
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


class ImageRequest(Strict):
    """The image: a row of the matrix by its tag, or any image by its full name.

    `extras` are packages and named sets of the matrix that it was built with beside the row's own.
    """

    tag: Tag | None = None
    name: Reference | None = None
    megatron: Annotated[Text, Regex(r"\d+\.\d+\.\d+[\w.+-]*", 'a release: "0.9.0"')] | None = None
    extras: list[Extra] = Field(default_factory=list)
    python: Annotated[Text, Regex(r"[\w./+-]+", "a program: /opt/venv/bin/python")] = PYTHON

    @model_validator(mode="before")
    @classmethod
    def spelled_out(cls, value: Any) -> Any:
        """`image: "24.10"` for `image: {tag: "24.10"}`, and a name where it has a / or a :."""
        if isinstance(value, str) and re.search("[/:@]", value):
            return {"name": value}
        return {"tag": value} if isinstance(value, str | float) else value

    @model_validator(mode="after")
    def _one(self) -> ImageRequest:
        if (self.tag is None) == (self.name is None):
            raise ValueError("give a tag of the matrix or the full name of an image, one of both")
        if self.name and self.extras:
            raise ValueError("extras are of a tag of the matrix: another image has what it has")
        return self


class Megatron(Strict):
    """What the Megatron at hand is taken for: `as`, a series that is described."""

    model_config = ConfigDict(**Strict.model_config, populate_by_name=True)

    as_: Annotated[Text, Regex(r"\d+\.\d+", 'a series: "0.19"')] = Field(alias="as")

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

    `precision` is fp16, bf16, or fp8: bf16 with fp8_format: hybrid. fp16, bf16 outweigh `auto`.
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
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] | None = None
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
    """The training data."""

    path: Prefixes | None = None
    """A path without .bin and .idx; or weights and paths: [0.3, /data/a, 0.7, /data/b]."""
    text: Texts | None = None
    """Text files to tokenize before the start, in any format of `data tokenize`."""
    text_key: Text | None = None
    """The JSON key or the column that contains the text; by default `text`."""
    mock: Flag = False
    """Train on made-up tokens, if `path` isn't given."""
    split: Shares | None = None
    """Shares of training, validation and test documents: "949,50,1" or a list."""
    cache: Text | None = None
    """The folder for Megatron's index of the data; by default in the launcher's cache."""
    vocab_size: Positive | None = None
    """The size of the vocabulary, with the end-of-document token."""
    vocab_file: Text | None = None
    merge_file: Text | None = None
    tokenizer_type: Text | None = None
    tokenizer_model: Text | None = None
    num_workers: Whole | None = None


class Checkpoint(Strict):
    """The folders that checkpoints are saved to and loaded from."""

    save: Text | None = None
    """The folder to save to. A missing folder is made."""
    load: Text | None = None
    """The folder whose newest complete checkpoint the run loads."""
    save_interval: Positive | None = None
    """The number of iterations between two saves."""
    keep: Positive | None = None
    """The number of newest complete checkpoints to keep. Older ones are removed."""
    save_overwrite: Flag | None = None
    """Save to a folder with another run's checkpoints; replace those of the same iteration."""
    exit_signal_handler: Flag | None = None
    """Save a checkpoint when the run is asked to stop. With `save`, this is true by default."""
    no_load_optim: Flag | None = None
    no_load_rng: Flag | None = None
    finetune: Flag | None = None


class Logging(Strict):
    """What a run reports, where, and how often.

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
    target: Annotated[Text, Regex(r"/.+", "an absolute path: /data")]
    read_only: Flag = True


class Resources(Strict):
    """Memory, limits, network, devices and user of the container."""

    ipc: Literal["host", "private", "shareable"] | None = None
    """IPC: `host`, `private`, `shareable`. By default `host` with several GPUs, else `private`."""
    shm_size: Size | None = None
    """Size of a private /dev/shm: 16g. Default: 64 MiB if the file sets `ipc`, else 8 GiB."""
    memory: Size | None = None
    """The container's memory limit: 64g. A run that reaches it ends with exit code 137."""
    ulimits: dict[Text, Annotated[int, Field(strict=True, ge=-1)]] | None = None
    """Limits of processes. Default: `stack: 67108864`, and with GPUs also `memlock: -1`."""
    network: Text | None = None
    """A network of the engine, `host` or `none`. By default `host` with several machines."""
    devices: list[Device] | None = None
    """Devices to add. By default /dev/infiniband, if the run has several nodes."""
    cap_add: list[Annotated[Text, Regex("[A-Z_]+", "a capability: IPC_LOCK")]] = Field(
        default_factory=list
    )
    """Linux capabilities to add, such as IPC_LOCK."""
    user: Annotated[Text, Regex(r"\d+(:\d+)?|auto|image", "auto, image or 1000:1000")] = "auto"
    """`auto` (you, or the user who called sudo), `image` (the image's user), or 1000:1000."""
    no_new_privileges: Flag = True
    """Setuid programs in the container give no new rights."""
    workdir: Text | None = None
    """A folder, mounted at /work, in which the program starts. By default, it starts in /tmp."""
    stop_grace: Whole = 600
    """Seconds between the request to stop and SIGKILL."""

    @model_validator(mode="after")
    def _shared_memory(self) -> Resources:
        if self.shm_size and self.ipc in (None, "host"):
            raise ValueError("shm_size has no effect with ipc: host; write ipc: private with it")
        return self


class Nodes(Strict):
    """Several machines: this one's number, and where the first one is reached."""

    count: Positive = 1
    """The number of nodes (machines). `nodes: 16` is short for `nodes: {count: 16}`."""
    min: Positive | None = None
    """If nodes are missing, the run starts or continues with at least this many."""
    spare: Whole = 0
    """Nodes to ask Slurm for in addition. They replace nodes that fail the checks at the start."""
    rank: Whole = 0
    """The number of this node. The first node has 0."""
    master_addr: Text | None = None
    """The address of the first node."""
    master_port: Annotated[int, Field(strict=True, gt=0, lt=65536)] = 29500
    """The port on which the first node listens."""

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
    """What is done about a run that writes nothing."""

    timeout: Whole = 1800
    """Seconds without output after which the launcher reads the ranks' stacks; 0: never."""
    action: Literal["keep", "end"] = "keep"
    """After reading the stacks: `keep` lets the run go on, `end` ends it."""


class Guard(Strict):
    """What is done where numbers go wrong: a warning, an end, or back to a checkpoint."""

    on_nan: Literal["ignore", "warn", "end", "rewind"] = "warn"
    """What to do if a loss or gradient norm is NaN or infinite: ignore, warn, end or rewind."""
    on_spike: Literal["ignore", "warn", "end", "rewind"] = "warn"
    """What to do if a loss or gradient norm rises suddenly: ignore, warn, end or rewind."""
    on_flat: Literal["ignore", "warn", "end"] = "warn"
    """What to do if the loss doesn't change: ignore, warn or end."""
    window: Annotated[int, Field(strict=True, ge=20, le=10_000)] = 50
    """The number of earlier log lines with which a loss or norm is compared."""
    threshold: NotNegative = 8.0
    """A spike is more than this many deviations above the median of `window` lines."""
    max_rewinds: Whole = 3
    """How often the run may be rewound. After that, it is ended."""

    @property
    def goes_back(self) -> bool:
        """Whether it ever does."""
        return "rewind" in (self.on_nan, self.on_spike)


class Profile(Strict):
    """Steps that are traced, and by which tool."""

    steps: Steps
    """The first and the last iteration to trace: 10-12."""
    tool: Literal["torch", "nsys"] = "torch"
    """`torch` (torch's profiler) or `nsys` (NVIDIA's Nsight Systems)."""
    ranks: Annotated[list[Whole], Field(min_length=1)] = Field(default_factory=lambda: [0])
    """The ranks (processes) to trace."""
    folder: Text | None = None
    """The folder for traces; by default in the run's record."""

    @property
    def first(self) -> int:
        """The first step's number."""
        return int(self.steps.partition("-")[0])

    @property
    def last(self) -> int:
        """The last step's number."""
        return int(self.steps.partition("-")[2])


class RunConfig(Strict):
    """A run file; tools/json_schema.py describes its keys."""

    name: Name
    image: ImageRequest
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
