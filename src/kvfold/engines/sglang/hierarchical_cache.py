"""SGLang's hierarchical cache (HiCache) with packed pages: host memory, and files behind it.

SGLang itself decides which pages are kept where. The hooks give it a host pool for packed pages, name stored pages
after recipe and artifact, and add a checksum to each.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.artifact import digest_model
from kvfold.engines.serving import Config
from kvfold.engines.sglang import logger
from kvfold.engines.stored_pages import CHECKSUM_BYTES, checksum, name_of_pages
from kvfold.geometry import Geometry, listed

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.server_args import ServerArgs

STORAGE = ("file",)  # kinds of storage whose pages have checksums
HOST_POOL = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.get_mha_host_pool_cls"
STORAGE_CONFIG = "sglang.srt.managers.cache_controller.HiCacheController._generate_storage_config"
FILES = "sglang.srt.mem_cache.hicache_storage.HiCacheFile"


def prepare(arguments: "ServerArgs", geometry: Geometry) -> None:
    """Refuse what would keep wrong pages or none, and set the arguments that packed pages need."""
    from sglang.srt.environ import envs

    if not arguments.enable_hierarchical_cache:
        return
    if arguments.speculative_algorithm:
        raise ValueError(
            "--enable-hierarchical-cache does not go together with --speculative-algorithm: leave one of them out"
        )
    if arguments.hicache_storage_backend and arguments.enable_memory_saver:
        raise ValueError(
            "--hicache-storage-backend does not go together with --enable-memory-saver, since stored pages would "
            "outlive the weights that they belong to: leave one of them out"
        )
    if others := [number for number, layer in enumerate(geometry.layers) if layer.kind != "full"]:
        raise ValueError(
            f"--enable-hierarchical-cache needs a model whose layers are all packed, and layers {listed(others)} of "
            f"{geometry.architecture} are not: leave it out"
        )
    if arguments.hicache_ratio is None and not arguments.hicache_size:
        arguments.hicache_ratio = 2.0  # SGLang finds a smaller one itself, but only for its own pools
    if hasattr(envs, "SGLANG_ENABLE_UNIFIED_RADIX_TREE"):  # up to 0.5.20: the other tree knows SGLang's own pools alone
        envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE.set(True)


def host_pool(choose: Callable[[Any], type], device_pool: Any) -> type:
    """The class of the host pool for a pool on the device."""
    from kvfold.engines.sglang.packed_host_pool import PackedHostPool
    from kvfold.engines.sglang.packed_pool import PackedPool

    return PackedHostPool if isinstance(device_pool, PackedPool) else choose(device_pool)


def name_storage(
    config: "HiCacheStorageConfig", controller: "HiCacheController", *_: Any, **__: Any
) -> "HiCacheStorageConfig":
    """Let names of stored pages tell who packed them. Called when storage is attached, at start or later."""
    if controller.storage_backend_type not in STORAGE:
        raise ValueError(
            f"--hicache-storage-backend {controller.storage_backend_type} does not store packed pages: take file"
        )
    plan = controller.mem_pool_device.served.plan
    packed_by = f"{_name()}-{plan.page_size}-{str(plan.raw_dtype).removeprefix('torch.')}"
    config.model_name = f"{config.model_name or ''}-{packed_by}"
    return config


@cache
def _name() -> str:
    from sglang.srt.runtime_context import get_server_args

    config = Config.read()
    assert config is not None
    arguments = get_server_args()
    if (weights := digest_model(arguments.model_path, arguments.revision)) is None:
        raise ValueError(
            f"files of pages are named after the weights, and this machine has no safetensors files of "
            f"{arguments.model_path}: run `hf download {arguments.model_path}`, or leave out --hicache-storage-backend"
        )
    return name_of_pages(
        config, weights, arguments.revision, arguments.quantization, arguments.json_model_override_args
    )


def store(
    original: Callable[..., bool], files: "HiCacheFile", key: str, value: Tensor, *arguments: Any, **options: Any
) -> bool:
    """Store a page, and its checksum behind it."""
    page = value.contiguous().view(torch.uint8).flatten()
    added = torch.frombuffer(bytearray(_checksum(files, key, page)), dtype=torch.uint8)
    return original(files, key, torch.cat((page, added)), *arguments, **options)


def fetch(
    original: Callable[..., Tensor | None], files: "HiCacheFile", key: str, target: Tensor, *_: Any, **__: Any
) -> Tensor | None:
    """Read a stored page into `target`. Without its checksum it is refused, and its file is removed."""
    stored = torch.empty(target.nbytes + CHECKSUM_BYTES, dtype=torch.uint8)
    try:
        if original(files, key, stored) is None:  # there is none
            return None
    except OSError as error:
        if error.errno is not None:  # the file system's own, as too many open files
            return None
        stored.zero_()  # it is too short
    page, added = stored.split([target.nbytes, CHECKSUM_BYTES])
    if added.numpy().tobytes() != _checksum(files, key, page):
        refuse(files, key)
        return None
    target.view(torch.uint8).flatten().copy_(page)
    return target


def _checksum(files: "HiCacheFile", key: str, page: Tensor) -> bytes:
    return checksum(files._get_suffixed_key(key), page.numpy().data)


def refuse(files: "HiCacheFile", key: str) -> None:
    from kvfold.engines.gauges import count_refused_page

    count_refused_page()
    name = files._get_suffixed_key(key)
    logger.warning("kvfold: stored page %s is not what was stored: it is computed again", name)
    if files.metadata_cache is not None:
        files.metadata_cache.remove(name)
    files._evictor.abort(name)
    Path(files.file_path, f"{name}.bin").unlink(missing_ok=True)
