"""What is checked before a run starts: the run against the machine it is to start on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.machine.finding import Finding, enforce

if TYPE_CHECKING:
    from launcher.machine.machine import Machine
    from launcher.plan.config import RunConfig
    from launcher.plan.plan import Plan
    from launcher.plan.source import Origin

__all__ = ["Finding", "enforce", "preflight"]


def preflight(
    config: RunConfig, origin: Origin, plan: Plan, machine: Machine, cuda: str | None = None
) -> list[Finding]:
    """All that is wrong with a run on a machine; pure. What `machine` doesn't tell isn't checked.

    `cuda` is the version in the image, where that is known.
    """
    from launcher.machine import driver, files, fit, gpus, host
    from launcher.plan.layout import layout

    config = _with_rest(config, plan)
    found: list[Finding] = []
    if plan.gpus.count:
        precision = "bf16" if config.training.bf16 else "fp16"
        found += gpus.check(config, origin.of(f"training.{precision}"), plan.gpus, machine)
        visible = gpus.chosen(plan.gpus, machine.gpus or ())
        if visible and cuda and (old := driver.check(visible[0].driver, cuda, visible[0].name)):
            found.append(old)
        found += fit.check(config, origin, plan.processes_per_node, visible, machine.uses)
    found += host.check(config, origin, plan, machine)
    found += files.check(config, origin, layout(config, plan.processes_per_node), machine)
    return found


def _with_rest(config: RunConfig, plan: Plan) -> RunConfig:
    """The configuration with what was given after `--` among its megatron_args."""
    from launcher.plan.keys import own_keys

    given: dict[str, str | bool] = {}
    name = ""
    for word in plan.argv[plan.argv.index("--") + 1 :] if "--" in plan.argv else ():
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given[name] = value if equals else True
        elif name and given[name] is True:
            given[name] = word
    extra = {key[2:]: value for key, value in given.items() if key not in own_keys()}
    return config.model_copy(update={"megatron_args": {**config.megatron_args, **extra}})
