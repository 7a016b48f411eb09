"""Pages that vLLM's OffloadingConnector keeps in CPU memory and in files."""

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig

from kvfold.artifact import digest_model
from kvfold.engines.stored_pages import name_of_pages
from kvfold.engines.vllm.configuration import asked_for

SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")  # values of spec_name; the first is vLLM's default
FILES = {"type": "CheckedFileTier", "module_path": "kvfold.engines.vllm.file_tier"}


def refusals(transfer: KVTransferConfig | None) -> dict[str, bool]:
    """Why a connector would give wrong answers, and whether it would."""
    if transfer is None:
        return {}
    given = transfer.kv_connector_extra_config
    spec, types = given.get("spec_name", SPECS[0]), {tier.get("type") for tier in tiers(transfer)}
    return {
        f"{transfer.kv_connector} is not supported: of KV connectors, use OffloadingConnector": (
            transfer.kv_connector != "OffloadingConnector" or transfer.kv_connector_module_path is not None
        ),
        f"spec_name {spec} of OffloadingConnector is not tested: use {' or '.join(SPECS)}": (
            spec not in SPECS or "spec_module_path" in given
        ),
        "canonical_layout would cut packed pages into tokens: leave it out": bool(given.get("canonical_layout")),
        "secondary_tiers are tested with files alone: leave out all but those of type fs": (
            not types <= {"fs", FILES["type"]}
        ),
    }


def tiers(transfer: KVTransferConfig | None) -> list[dict[str, Any]]:
    """What is below CPU memory."""
    return [] if transfer is None else transfer.kv_connector_extra_config.get("secondary_tiers") or []


def check_files(config: VllmConfig) -> None:
    """Let files of pages be checked when they are read, in a folder whose name says what packed them."""
    below, choice = tiers(config.kv_transfer_config), asked_for(config)
    if not below or choice is None:
        return
    parallel, model = config.parallel_config, config.model_config
    if (weights := digest_model(model.model, model.revision)) is None:
        raise ValueError(
            f"files of pages are named after the weights, and this machine has no safetensors files of "
            f"{model.model}: run `hf download {model.model}`"
        )
    others = model.revision, model.quantization, model.hf_config.to_json_string()
    ranks = f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
    name = f"{name_of_pages(choice, weights, *others)}-{ranks}"
    for tier in below:
        if tier["type"] == "fs":
            tier.update(FILES, root_dir=f"{tier['root_dir']}/{name}")
        elif Path(tier["root_dir"]).name != name:  # vLLM makes its configuration twice, of the same dictionary
            raise ValueError("this kv_transfer_config was used with another recipe or model: give each engine its own")
