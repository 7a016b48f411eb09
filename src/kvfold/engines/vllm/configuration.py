"""What a vLLM configuration asks kvfold for. Imports nothing that can fail: see plugin.py."""

import os
from typing import TYPE_CHECKING

from kvfold.engines.start import RECIPE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvfold.engines.serving import Config

SIXTEEN_BITS = ("auto", "bfloat16", "float16")  # values of --kv-cache-dtype that quantize nothing


def asked_for(config: "VllmConfig") -> "Config | None":
    """What a vLLM configuration asks kvfold for, or else the environment. None: neither does."""
    extra = config.additional_config
    given = extra.get("kvfold") if isinstance(extra, dict) else None
    if given is None and not os.environ.get(RECIPE):
        return None
    from kvfold.engines.serving import Config

    return Config.read(given)
