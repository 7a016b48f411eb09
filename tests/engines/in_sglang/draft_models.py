"""What SGLang lacks to run draft models on a CPU."""

from pathlib import Path
from typing import Any

from eagle_model import save_eagle
from plain_attention import NAME, PlainBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from torch import Tensor


def eagle(model: Path, folder: Path) -> dict[str, Any]:
    """SGLang's arguments for chains of three drafts."""
    save_eagle(model, folder, "LlamaForCausalLMEagle")
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(folder),
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "speculative_draft_attention_backend": NAME,
    }


class Extending(PlainBackend):
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """There is none."""


class Drafting(Extending):
    """One step of drafts. SGLang's lengths are those before the first step."""

    def __init__(self, runner: ModelRunner, step: int) -> None:
        super().__init__(runner)
        self.step = step

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: ForwardBatch, **_: Any) -> Tensor:
        before, batch.seq_lens = batch.seq_lens, batch.seq_lens + self.step + 1
        out = self.forward_extend(q, k, v, layer, batch)
        batch.seq_lens = before
        return out


class Steps:
    def __init__(self, factory: DraftBackendFactory) -> None:
        steps = range(factory.speculative_num_steps)
        self.attn_backends = [Drafting(factory.draft_model_runner, step) for step in steps]

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """There is none."""


def draft_plainly() -> None:
    """Let draft models of SGLang attend in plain PyTorch."""
    DraftBackendFactory._create_triton_decode_backend = lambda factory: (NAME, Steps(factory))
    DraftBackendFactory._create_triton_prefill_backend = lambda factory: (NAME, Extending(factory.draft_model_runner))
