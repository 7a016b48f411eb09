"""What a vLLM configuration asks kvfold for. Imports nothing that can fail: see plugin.py."""

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING

from kvfold.engines.start import RECIPE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvfold.engines.serving import Config

SIXTEEN_BITS = ("auto", "bfloat16", "float16")  # values of --kv-cache-dtype that quantize nothing
drafting = ContextVar("drafting", default=False)  # whether vLLM makes the configuration of a draft model


def asked_for(config: "VllmConfig") -> "Config | None":
    """What a vLLM configuration asks kvfold for, or else the environment. None: neither does, or the configuration is
    that of a draft model."""
    if drafting.get():
        return None
    extra = config.additional_config
    given = extra.get("kvfold") if isinstance(extra, dict) else None
    if given is None and not os.environ.get(RECIPE):
        return None
    from kvfold.engines.serving import Config

    return Config.read(given)
