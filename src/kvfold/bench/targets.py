"""`--target sm_80`: the kernels as another GPU gets them, on the GPU at hand."""

import os
import re

import torch

Capability = tuple[int, int]


def parse(target: str) -> Capability:
    """The compute capability of a target."""
    found = re.fullmatch(r"sm_(\d+)(\d)", target)
    if found is None:
        raise ValueError(f"{target!r} is no target: write sm_ and the compute capability without its dot, as in sm_80")
    return int(found[1]), int(found[2])


def name(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)


def build_for(target: str | None) -> Capability:
    """The compute capability of this target; without one, that of the GPU at hand.

    From now on, this process and those that it starts compile for the target. What Triton compiled is then assembled
    for the GPU at hand.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no GPU on which kernels for {target} could run")
    own = torch.cuda.get_device_capability()
    capability = own if target is None else parse(target)
    if capability > own:
        raise ValueError(f"{torch.cuda.get_device_name()} is {name(own)}, and cannot run kernels for {target}")
    if target is not None:
        os.environ["TRITON_OVERRIDE_ARCH"] = target.replace("_", "")
    return capability
