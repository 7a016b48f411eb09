"""Draft models of speculative decoding, and layers of a model that draft (MTP). They stay in 16 bits, beside packed
layers in one block table."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from kvfold.engines.vllm.configuration import drafting


def keep_raw() -> None:
    """Let vLLM choose the backend of draft models, as it does without kvfold."""
    for proposer in (SpecDecodeBaseProposer, DraftModelProposer):
        if not hasattr(proposer._create_draft_vllm_config, "__wrapped__"):
            proposer._create_draft_vllm_config = _unpacked(proposer._create_draft_vllm_config)


def _unpacked(create: Callable[[Any], VllmConfig]) -> Callable[[Any], VllmConfig]:
    @wraps(create)
    def wrapped(proposer: Any) -> VllmConfig:
        token = drafting.set(True)
        try:
            return create(proposer)
        finally:
            drafting.reset(token)

    return wrapped
