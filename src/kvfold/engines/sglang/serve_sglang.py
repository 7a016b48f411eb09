"""SGLang's OpenAI server with the plugin on."""

import os
from collections.abc import Sequence

import torch
from sglang.launch_server import run_server
from sglang.srt.model_executor.model_runner_components import attention_backend_setup
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree

from kvfold.engines.serving import Config
from kvfold.engines.start import ARTIFACT, RECIPE

CPU_FLAGS = ("--device", "cpu", "--dtype", "float32", "--grammar-backend", "none", "--max-total-tokens", "32768")


def serve(model: str, name: str, config: Config, flags: Sequence[str]) -> None:
    """Serve a model folder or Hub id under a name, until interrupted. `flags` are SGLang's own. If one is given twice,
    the last counts."""
    os.environ[RECIPE], os.environ[ARTIFACT] = str(config.recipe), config.artifact or ""
    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        flags = [*CPU_FLAGS, *flags]
    load_plugins()
    if not hasattr(attention_backend_setup._build_full_attention_backend_from_str, "__wrapped__"):  # by the plugin
        raise ImportError("SGLang did not load kvfold's plugin: install kvfold with pip, and see SGLANG_PLUGINS")
    try:
        run_server(prepare_server_args(["--model-path", model, "--served-model-name", name, *flags]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
