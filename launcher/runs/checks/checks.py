"""Checks a run against the machine that it is to start on. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

from launcher.agent.series import numbers
from launcher.base.errors import PreflightError
from launcher.base.screen import size
from launcher.runs.backends.docker.docker_request import bytes_of_size
from launcher.runs.checks import checkpoint_folders, fit, memory
from launcher.runs.checks.machine import (
    UNLIMITED,
    Dataset,
    Engine,
    Finding,
    Gpu,
    Machine,
    Use,
    find_gpu,
)
from launcher.runs.plan.plan import Plan
from launcher.runs.plan.program import ProgramKind, program
from launcher.runs.plan.program_options import key_of
from launcher.runs.plan.render import null_adds_one
from launcher.runs.plan.resolved import Resolved
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin
from launcher.runs.runfile.values import Gpus

FP8, BF16, TENSOR_CORES, FP16 = (8, 9), (8, 0), (7, 0), (5, 3)
"""Compute capabilities with fp8's and bf16 arithmetic, fp16 tensor cores, and fp16 arithmetic.

CUDA C++ Programming Guide, "Compute Capabilities".
"""

FIRST_CUDA = {9: (11, 8), 10: (12, 8), 12: (12, 8)}
"""The first CUDA with code for GPUs, by the first figure of their compute capability.

https://docs.nvidia.com/cuda/archive/11.8.0 and 12.8.0, release notes, as for the next
"""

CUDA_13, OLDEST_13 = (13, 0), (7, 5)
"""CUDA 13 has no code for GPUs below this compute capability."""

TOOLKIT_DRIVER = {
    (12, 0): "525.60.13",
    (12, 1): "530.30.02",
    (12, 2): "535.54.03",
    (12, 3): "545.23.06",
    (12, 4): "550.54.14",
    (12, 5): "555.42.02",
    (12, 6): "560.28.03",
}
"""The driver that each toolkit was released with: of its first version, updates included.

CUDA Toolkit Release Notes, "CUDA Toolkit and Corresponding Driver Versions", Linux x86_64:
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
"""

LEAST_DRIVER = {11: "450", 12: "525.60.13", 13: "580"}
"""Below these a major version of CUDA doesn't run.

https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""

DATA_CENTRE = re.compile(
    r"\bTesla\b|\b(P4|P40|P100|V100|T4|A2|A10|A16|A30|A40|A100|A800|L2|L4|L20|L40S?|H20|H100|H200|H800"
    r"|GH200|B100|B200|B300|GB200|GB300)\b"
)
"""Names of the GPUs that forward compatibility is for: those of data centres.

https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html
"""

PRIVATE_SHM = 64 << 20
"""Default bytes of a container's own /dev/shm: docker run, --shm-size."""

SHM = 1 << 30
"""Bytes of /dev/shm that NVIDIA asks for with NCCL in a container, `--shm-size=1g`.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/runtime_and_mpi_issues.html
"""

SHM_SEGMENT = 4 << 20
"""Bytes of one of NCCL's segments, as in the failure that the same page shows."""


def preflight(
    resolved: Resolved, plan: Plan, machine: Machine, cuda: str | None = None
) -> list[Finding]:
    """All that is wrong with a run on a machine; what `machine` doesn't know isn't checked."""
    config, origin = _with_rest(resolved.config, plan), resolved.origin
    found: list[Finding] = []
    if plan.gpus.count:
        there, uses = machine.gpus, machine.uses
        visible = chosen(plan.gpus, there or ())
        found += gpus_are_given(machine.engine)
        found += gpus_are_there(plan.gpus, there)
        found += _able(config, origin, visible)
        found += gpus_are_free(visible, uses)
        found += driver_carries(visible, cuda)
        found += _code_is_there(visible, cuda)
        found += fit.check_fit(resolved.with_config(config), visible, uses)
        found += _shared_memory(origin, plan, machine)
        found += _locked_memory(plan, machine.memlock)
    found += _nodes_meet(config, origin, plan, machine)
    found += [
        Finding(
            f"{origin.place('data.path')}: {dataset.problem}",
            "Megatron would stop, or read other tokens than were written.",
            "Make both files again from the text, or copy both again.",
        )
        for dataset in machine.datasets
        if dataset.problem
    ]
    found += _tokens_fit(config, origin, machine.datasets, resolved.facts.release)
    if machine.datasets:
        from launcher.runs.checks import splits

        found += splits.check_splits(resolved, machine.datasets)
    found += _folders(resolved, machine)
    return [*found, *checkpoint_folders.check_loaded(origin, plan, machine.load)]


def enforce(findings: Sequence[Finding]) -> None:
    """Print the warnings on stderr. Raises PreflightError with every refusal."""
    for finding in findings:
        if not finding.refuse:
            print(f"launcher: warning: {finding}", file=sys.stderr, flush=True)
    refusals = [str(finding) for finding in findings if finding.refuse]
    if refusals:
        raise PreflightError("\n".join(refusals), "--no-preflight starts it anyway.")


def _with_rest(config: RunConfig, plan: Plan) -> RunConfig:
    """The configuration with what was given after `--` among its megatron_args."""
    passed = {
        name: value
        for name, value in plan.options.items()
        if key_of(name).startswith("megatron_args.")
    }
    return config.model_copy(update={"megatron_args": passed})


def chosen(asked: Gpus, there: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that a request makes visible, without those that aren't there."""
    if asked.devices:
        return [gpu for gpu in (find_gpu(device, there) for device in asked.devices) if gpu]
    return list(there if asked.everything else there[: asked.count])


def gpus_are_given(engine: Engine | None) -> Iterator[Finding]:
    """Whether the engine can give GPUs to a container."""
    if engine is None or engine.gpus:
        return
    sure = engine.gpus is False
    yield Finding(
        "the engine has neither NVIDIA's runtime nor CDI devices"
        + ("" if sure else ", as far as it reports"),
        "Without the NVIDIA Container Toolkit it can't give GPUs to a container.",
        "Install the toolkit on its machine, run `nvidia-ctk runtime configure --runtime=docker`,"
        " and restart the engine; or use --gpus 0.",
        refuse=sure,
    )


def gpus_are_there(asked: Gpus, there: Sequence[Gpu] | None) -> Iterator[Finding]:
    """As many as asked for, and those that are named."""
    if there is None:
        return
    if not there:
        yield Finding(
            f"gpus: {asked}, and the driver finds none on this machine",
            "A process needs a GPU of its own.",
            "--gpus 0 trains on the CPU.",
        )
        return
    indices = ", ".join(str(gpu.index) for gpu in there)
    for device in asked.devices:
        if find_gpu(device, there) is None and not device.upper().startswith("MIG-"):
            yield Finding(
                f"gpus: no device {device} on this machine",
                f"There are {indices}: " + "; ".join(gpu.uuid for gpu in there),
                f"--gpus device={indices.replace(' ', '')}, or fewer of them.",
            )
    if not asked.devices and (asked.count or 0) > len(there):
        yield Finding(
            f"gpus: {asked}, and this machine has {len(there)}",
            "Each process needs a GPU of its own, or the ranks wait for one that never comes.",
            f"--gpus {len(there)}",
        )


def _able(config: RunConfig, origin: Origin, visible: Sequence[Gpu]) -> Iterator[Finding]:
    """The compute capability against the precision, of each kind of GPU once."""
    training, fp8 = config.training, "megatron_args.fp8_format"
    place = origin.place(f"training.{'bf16' if training.bf16 else 'fp16'}")
    for gpu in {gpu.name: gpu for gpu in reversed(visible)}.values():
        if gpu.capability is None:
            continue
        able = ".".join(map(str, gpu.capability))
        card = f"GPU {gpu.index} is a {gpu.name}, compute capability {able}"
        what = f"{place}: {card}"
        if "fp8_format" in config.megatron_args and gpu.capability < FP8:
            mend = "Leave it out, or take such a GPU."
            yield Finding(f"{origin.place(fp8)}: {card}", "FP8 needs 8.9 (L40, H100).", mend)
        if training.bf16 and gpu.capability < BF16:
            mend = "--set training.precision=fp16 --set training.bf16=null"
            yield Finding(what, "bf16 needs 8.0 (A100, RTX 30) or newer.", mend)
        if training.fp16 and gpu.capability < FP16:
            mend = "--set training.precision=fp32 --set training.fp16=null"
            yield Finding(what, "fp16 needs 5.3 or newer.", mend)
        elif training.fp16 and gpu.capability < TENSOR_CORES:
            yield Finding(
                what,
                "Tensor cores for fp16 come with 7.0 (V100): here fp16 saves memory, not time.",
                "Take a newer GPU if there is one.",
                refuse=False,
            )


def gpus_are_free(visible: Sequence[Gpu], uses: Sequence[Use]) -> Iterator[Finding]:
    """Other processes on the GPUs that the run will use; a warning, as they may share them."""
    for gpu in visible:
        if users := [str(use) for use in uses if use.gpu == gpu.uuid]:
            yield Finding(
                f"GPU {gpu.index} is in use: {', '.join(users)}",
                "The run shares its memory and its time.",
                "Choose free ones: --gpus device=…",
                refuse=False,
            )


def driver_carries(visible: Sequence[Gpu], cuda: str | None) -> Iterator[Finding]:
    """The driver, one for all GPUs of a machine, against the CUDA of the image."""
    if not visible or not cuda:
        return
    gpu, driver = visible[0].name, visible[0].driver
    have, (major, minor) = numbers(driver), (*numbers(cuda), 0)[:2]
    least, own = LEAST_DRIVER.get(major), TOOLKIT_DRIVER.get((major, minor))
    what = f"driver {driver}; the image has CUDA {cuda}"
    if least and have < numbers(least):
        carried = bool(DATA_CENTRE.search(gpu))
        yield Finding(
            what,
            f"CUDA {major} needs driver {least} or newer"
            + (f"; on {gpu} the image's forward compatibility may carry it." if carried else "."),
            f"Install driver {own or least} or newer, or take an image with an older CUDA.",
            refuse=not carried,
        )
    elif own and have < numbers(own):
        yield Finding(
            what,
            f"CUDA {major}.{minor} came with {own}; older ones carry it by minor version "
            "compatibility, without what is new in it.",
            f"Install driver {own} or newer if something isn't supported.",
            refuse=False,
        )


def _code_is_there(visible: Sequence[Gpu], cuda: str | None) -> Iterator[Finding]:
    """The image's CUDA against each kind of GPU, of which it may be too old, or too new."""
    for gpu in {gpu.name: gpu for gpu in reversed(visible)}.values():
        if gpu.capability is None or not cuda:
            continue
        able, have, first = gpu.capability, numbers(cuda)[:2], FIRST_CUDA.get(gpu.capability[0])
        what = f"GPU {gpu.index} is a {gpu.name}, compute capability {able[0]}.{able[1]}"
        if first and have < first:
            yield Finding(
                f"{what}; the image has CUDA {cuda}",
                f"CUDA {first[0]}.{first[1]} is the first with code for it: older libraries have "
                "none, or translate theirs at each start.",
                "Take an image with that CUDA or a newer one.",
                refuse=False,
            )
        elif have >= CUDA_13 and able < OLDEST_13:
            yield Finding(
                f"{what}; the image has CUDA {cuda}",
                "CUDA 13 has no code for GPUs older than 7.5 (T4, RTX 20).",
                "Take an image with CUDA 12.",
            )


def _shared_memory(origin: Origin, plan: Plan, machine: Machine) -> Iterator[Finding]:
    """Shared memory, which the processes of a node pass data through."""
    hosts = machine.engine is None or plan.ipc == "host"
    own = bytes_of_size(plan.shm_size) if plan.shm_size else PRIVATE_SHM
    have = machine.shm if hosts else own
    if have is None or have >= SHM or plan.processes_per_node == 1:
        return
    yield Finding(
        f"{origin.place('resources.ipc')}: {have >> 20} MiB of /dev/shm for "
        f"{plan.processes_per_node} processes",
        "NCCL and data loaders pass data through it, and fail to start where it is full; "
        "NVIDIA asks for 1 GiB.",
        "Free or enlarge it: mount -o remount,size=8g /dev/shm"
        if hosts
        else "--set resources.ipc=private --set resources.shm_size=8g, or ipc: host",
        refuse=have < SHM_SEGMENT * plan.processes_per_node,
    )


def _locked_memory(plan: Plan, have: int | None) -> Iterator[Finding]:
    wanted, several = dict(plan.ulimits).get("memlock"), plan.processes_per_node * plan.nodes > 1
    if wanted is None or have is None or have == UNLIMITED:
        return
    if several and (wanted == UNLIMITED or wanted > have):
        yield Finding(
            f"memlock: {have >> 10} KiB of memory may be locked",
            "NCCL must lock memory to send over InfiniBand. Within one machine it needs none.",
            "Raise it: ulimit -l unlimited, or LimitMEMLOCK=infinity for the engine's service.",
            refuse=False,
        )


def _nodes_meet(
    config: RunConfig, origin: Origin, plan: Plan, machine: Machine
) -> Iterator[Finding]:
    """The first node's port, and its name; not in a network that isn't this machine's."""
    nodes = config.nodes
    if nodes.count == 1 or plan.network != "host":
        return
    if nodes.rank == 0 and machine.port is False:
        yield Finding(
            f"{origin.place('nodes.master_port')}: port {nodes.master_port} is taken",
            "The first node listens there for all others.",
            f"End what listens, or --set nodes.master_port={nodes.master_port + 1} on every node.",
        )
    if nodes.rank > 0 and machine.resolves is False:
        yield Finding(
            f"{origin.place('nodes.master_addr')}: {nodes.master_addr} isn't known here",
            "This node has to reach the first one by that name.",
            "Give an address, or a name in /etc/hosts.",
            refuse=False,
        )


def _tokens_fit(
    config: RunConfig, origin: Origin, datasets: Sequence[Dataset], release: str | None
) -> Iterator[Finding]:
    """The vocabulary against the data, where the run file alone says how large it is."""
    known, own = config.data.vocab_size, config.data.tokenizer_type
    if known is None or own not in (None, "NullTokenizer"):
        return
    upstreams = own and program(config.program).kind is ProgramKind.UPSTREAM
    added = 1 if upstreams and null_adds_one(release) else 0
    for dataset in datasets:
        if dataset.greatest >= known + added:
            yield Finding(
                f"{origin.place('data.vocab_size')}: {known} is too small: {dataset.prefix} has "
                f"token {dataset.greatest}",
                "A GPU would end at it with an assertion, long after the start.",
                f"--set data.vocab_size={dataset.greatest + 1 - added}, or more if its tokenizer "
                "has more tokens.",
            )


def _folders(resolved: Resolved, machine: Machine) -> Iterator[Finding]:
    """The folders that are written to: seen by the engine, the user's to write to, and roomy."""
    config, origin = resolved.config, resolved.origin
    for key, path in machine.unseen:
        yield Finding(
            f"{origin.place(key)}: {path}: the engine sees something else there",
            "The engine doesn't see mounts that were made after its start. What the run writes "
            "there would be lost.",
            "Restart the engine, once all is mounted.",
        )
    for folder in machine.folders:
        if folder.problem:
            yield Finding(
                f"{origin.place(folder.key)}: {folder.path}: {folder.problem}",
                "What the run writes there would be lost.",
                "Give another folder, change its owner, or set resources.user.",
            )
        elif folder.key == "checkpoint.save":
            each = memory.bytes_of_checkpoint(config.program, resolved.values, resolved.layout)
            if each is not None and folder.free is not None:
                what = f"{origin.place(folder.key)}: {size(folder.free)} free for {folder.path}"
                done = machine.load.newest or 0 if machine.load else 0
                yield from checkpoint_folders.room(what, each, folder.free, config, done)
