"""Tasks of EleutherAI's lm-eval over a packed cache. Only data on this machine is used."""

import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.evaluate.retrieval import Make

BATCH = 16


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuse tasks that lm-eval does not know, and tasks without data on this machine. lm-eval must be installed."""
    if tasks:
        _require_lm_eval()
        from lm_eval.tasks import TaskManager

        try:
            TaskManager().load(list(tasks))
        except KeyError as error:
            raise ValueError(f"lm-eval: {error.args[0]}") from error


def lm_eval_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, make: Make, tasks: Sequence[str]
) -> dict[str, float]:
    """Scores by task and metric. `tasks` are names that lm-eval knows, or YAML files that describe a task."""
    _require_lm_eval()
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    class Packed(HFLM):
        """Every call of the model begins with an empty cache."""

        def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
            return self.model(inps, past_key_values=make()).logits

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
            return super()._model_generate(context, max_length, stop, past_key_values=make(), **options)

    network = Packed(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)
    results = simple_evaluate(network, tasks=list(tasks), bootstrap_iters=0, log_samples=False)["results"]
    return {
        f"{task} {name.removesuffix(',none')}": float(score)  # ",none" says that no filter was applied
        for task, scores in results.items()
        for name, score in scores.items()
        if isinstance(score, float) and "_stderr" not in name
    }


def _require_lm_eval() -> None:
    # `datasets` reads the variable at its first import. HF_DATASETS_OFFLINE=0 in the environment allows downloads.
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"tasks need lm-eval: pip install 'kvfold[tasks]' ({error})") from error
