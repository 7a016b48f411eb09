"""What happens before the first request: refusals, and the server as a user starts it."""

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import vllm
from forked import Ended, forked
from model_configs import MODELS
from operations_files import container
from served import kvfold
from tiny_models import HYBRIDS, SIZES, tiny
from vllm import EngineArgs
from vllm.config import KVTransferConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionBackend

from kvfold.engines import start
from kvfold.engines.serving import Config
from kvfold.engines.start import RECIPE
from kvfold.engines.vllm import backend, engine, offload, plan, plugin, serve_vllm
from kvfold.models import embedded_folder
from kvfold.recipes import parse


def drafts(method: str, tokens: int) -> SimpleNamespace:
    """What vLLM's configuration says of speculative decoding."""
    return SimpleNamespace(method=method, num_speculative_tokens=tokens)


def connector(name: str, **extra: object) -> KVTransferConfig:
    """What vLLM's configuration says of a KV connector."""
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


@pytest.fixture(scope="module")
def config(artifact):
    """The configuration of an engine that can be served."""
    given = {"kvfold": {"recipe": "saw-int4", "artifact": artifact}}
    return EngineArgs(str(embedded_folder()), dtype="float32", additional_config=given).create_engine_config()


def test_nothing_is_refused_that_works(config):
    assert plan.make_plan(config).token_bytes == (32 + 4) * 2 * 3 * 30
    speculating = copy.copy(config)
    for method in ("ngram", "suffix"):
        speculating.speculative_config = drafts(method, 127)  # without an open block there is no limit
        plan.refuse(speculating)


def test_what_is_made_for_layers_does_not_depend_on_the_default_device(config, monkeypatch):
    monkeypatch.setattr(engine, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(engine.Engine, "current", None)
    with torch.device("meta"):  # vLLM makes layers where it is the GPU
        made = engine.Engine.of(config)
    assert {key.transform.mean.device.type for key, _ in made.served.plan.codecs.values()} == {"cpu"}
    assert engine.Engine.of(copy.copy(config)) is made, "as vLLM copies it for the language model of a larger one"


def test_memory_as_measured_with_another_recipe_is_refused(config, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_STARTUP_PLAN takes memory as measured with other recipes"):
        plan.make_plan(config)


@pytest.mark.parametrize(
    ("part", "field", "value", "reason"),
    [
        ("cache_config", "cache_dtype", "fp8", "--kv-cache-dtype fp8 packs the cache in another way"),
        ("cache_config", "block_size", 24, "multiple of 16 tokens, not --block-size 24"),
        ("cache_config", "prefix_match_unit", 16, "--prefix-match-unit is not tested yet: leave it out"),
        ("cache_config", "kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill is not supported"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism is not supported"),
        *(
            (None, "kv_transfer_config", connector(name, **extra), reason)
            for name, extra, reason in (
                ("NixlConnector", {}, "NixlConnector is not supported: of KV connectors, use OffloadingConnector"),
                ("LMCacheMPConnector", {}, "LMCacheMPConnector is not supported"),
                ("SimpleCPUOffloadConnector", {}, "SimpleCPUOffloadConnector is not supported"),
                ("OffloadingConnector", {"spec_name": "Own", "spec_module_path": "own"}, "spec_name Own of Offloading"),
                ("OffloadingConnector", {"canonical_layout": True}, "canonical_layout would cut packed pages"),
                ("OffloadingConnector", {"secondary_tiers": [{"type": "p2p"}]}, "tested with files alone: leave out"),
            )
        ),
        (None, "speculative_config", drafts("ngram_gpu", 3), "by ngram_gpu is not tested yet: use ngram, suffix, ea"),
    ],
)
def test_configurations_that_are_refused(config, part, field, value, reason):
    changed = copy.copy(config)
    if part:
        setattr(changed, part, copy.copy(getattr(config, part)))
    setattr(getattr(changed, part) if part else changed, field, value)
    with pytest.raises(ValueError, match=reason):
        plan.make_plan(changed)


def with_open_block(config, tokens: int, block_size: int, user_specified: bool):
    """The same configuration for a recipe with an open block."""
    changed, cache = copy.copy(config), copy.copy(config.cache_config)
    changed.additional_config = {"kvfold": {"recipe": f"int4:centre=false,block={tokens}"}}
    cache.block_size, cache.user_specified_block_size = block_size, user_specified
    changed.cache_config = cache
    return changed


@pytest.mark.parametrize(("size", "chosen"), [(16, 64), (48, 192), (128, 128)])
def test_vllms_blocks_are_made_of_whole_open_blocks(config, size, chosen):
    changed = with_open_block(config, 64, size, user_specified=False)
    with patch.object(plan.logger, "info") as told:
        plugin.check(changed)
        plugin.check(changed)
    assert changed.cache_config.block_size == chosen
    said = [str(call.args[0]) % call.args[1:] for call in told.call_args_list]
    assert said == [f"kvfold: --block-size {chosen}, made of whole open blocks of 64 tokens"] * (size != chosen)


def test_a_block_size_that_cuts_open_blocks_is_refused(config):
    plan.refuse(with_open_block(config, 64, 192, user_specified=True))
    changed = with_open_block(config, 64, 96, user_specified=True)
    plan.choose_block_size(changed)
    with pytest.raises(ValueError, match="pages need a multiple of 64 tokens, not --block-size 96"):
        plan.refuse(changed)


@pytest.mark.parametrize(("recipe", "tokens"), [("int4", "64"), ("int4:block=32", "64"), ("int4:block=128", "128")])
def test_the_server_takes_pages_of_whole_open_blocks_on_a_gpu(monkeypatch, recipe, tokens):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert serve_vllm._platform_flags(Config(parse(recipe))) == ["--block-size", tokens]


def test_more_drafts_than_rings_have_room_for_are_refused(config):
    changed = with_open_block(config, 64, 64, user_specified=True)
    changed.speculative_config = drafts("ngram", 15)
    plan.refuse(changed)
    changed.speculative_config = drafts("ngram", 16)
    with pytest.raises(ValueError, match=r"at most 15 with an open block, and is 16: lower it, or add block=0 to the"):
        plan.refuse(changed)


def test_offloading_is_allowed_however_it_is_asked_for(config, artifact, tmp_path):
    """By its size alone too. Files are checked, and lie in a folder of their own: once, however often vLLM makes its
    configuration."""
    files = [{"type": "fs", "root_dir": str(tmp_path)}]
    changed = copy.copy(config)
    changed.kv_transfer_config = connector("OffloadingConnector", cpu_bytes_to_use=2**20, secondary_tiers=files)
    for _ in range(2):
        plugin.check(changed)
        assert files[0]["type"] == "CheckedFileTier"
        assert Path(files[0]["root_dir"]).parent == tmp_path
    given = {"kvfold": {"recipe": "saw-int4", "artifact": artifact}}
    arguments = EngineArgs(str(embedded_folder()), dtype="float32", additional_config=given, kv_offloading_size=1)
    assert arguments.create_engine_config().kv_transfer_config.kv_connector == "OffloadingConnector"


def test_files_of_pages_belong_to_one_recipe_and_to_weights(config, tmp_path, monkeypatch):
    files = [{"type": "fs", "root_dir": str(tmp_path)}]
    first, second = copy.copy(config), copy.copy(config)
    first.kv_transfer_config = second.kv_transfer_config = connector("OffloadingConnector", secondary_tiers=files)
    offload.check_files(first)
    second.additional_config = {"kvfold": {"recipe": "int4:centre=false"}}
    with pytest.raises(ValueError, match="used with another recipe or model: give each engine its own"):
        offload.check_files(second)
    monkeypatch.setattr(offload, "digest_model", lambda *_: None)  # as before they are downloaded
    with pytest.raises(ValueError, match=r"named after the weights, .* run `hf download "):
        offload.check_files(first)


def test_files_of_pages_that_outlive_weights_are_refused(config, tmp_path):
    changed, model = copy.copy(config), copy.copy(config.model_config)
    files = [{"type": "fs", "root_dir": str(tmp_path)}]
    changed.kv_transfer_config = connector("OffloadingConnector", cpu_bytes_to_use=2**20, secondary_tiers=files)
    plan.refuse(changed)
    model.enable_sleep_mode = True
    changed.model_config = model
    with pytest.raises(ValueError, match="weights that change while vLLM sleeps: leave out --enable-sleep-mode or sec"):
        plan.refuse(changed)


def test_draft_models_beside_offloading_are_refused(config):
    """Names of stored pages do not say which draft model wrote its part of a block."""
    changed = copy.copy(config)
    changed.kv_transfer_config = connector("OffloadingConnector", cpu_bytes_to_use=2**20)
    changed.speculative_config = drafts("eagle3", 3)
    with pytest.raises(ValueError, match="speculative decoding by eagle3 beside offloading is not tested yet: use ngr"):
        plan.refuse(changed)


def test_drafts_in_a_pipeline_are_refused(config):
    changed, parallel = copy.copy(config), copy.copy(config.parallel_config)
    parallel.pipeline_parallel_size = 2
    changed.parallel_config, changed.speculative_config = parallel, drafts("ngram", 3)
    with pytest.raises(ValueError, match="speculative decoding in a pipeline is not tested yet: leave out one"):
        plan.make_plan(changed)


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_drafts_of_a_model_need_steps_that_are_not_ahead(config, method):
    changed, scheduler = copy.copy(config), copy.copy(config.scheduler_config)
    scheduler.async_scheduling = True
    changed.scheduler_config, changed.speculative_config = scheduler, drafts("ngram", 3)
    plan.refuse(changed)
    changed.speculative_config = drafts(method, 3)
    with pytest.raises(ValueError, match=f"speculative decoding by {method} needs --no-async-scheduling"):
        plan.refuse(changed)


def of_model(config, fields: Mapping[str, Any], **changes: object):
    """The same configuration for another model, with changes to vLLM's own of the model."""
    changed, model = copy.copy(config), copy.copy(config.model_config)
    model.hf_config = SimpleNamespace(to_dict=lambda: dict(fields))
    vars(model).update(changes)
    changed.model_config = model
    return changed


@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_refused_as_the_table_says(config, name):
    model = MODELS[name]
    changed = of_model(config, model.config)
    if reason := model.refused or model.refused_by.get("vLLM"):
        with pytest.raises(ValueError, match=re.escape(reason)):
            plan.refuse(changed)
    else:
        plan.refuse(changed)


def test_images_whose_tokens_see_each_other_are_refused(config):
    changed = of_model(config, config.model_config.hf_config.to_dict(), is_mm_prefix_lm=True)
    with pytest.raises(ValueError, match="packed pages are read causally: add --language-model-only"):
        plan.refuse(changed)


def test_one_page_table_for_all_layers_is_refused(config):
    changed = of_model(config, MODELS["Gemma-3-27B"].config)
    changed.scheduler_config = copy.copy(config.scheduler_config)
    changed.scheduler_config.disable_hybrid_kv_cache_manager = True
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager would give"):
        plan.refuse(changed)


def test_packed_layers_of_unequal_size_beside_others_are_refused(config):
    fields = {**SIZES, **HYBRIDS["Gemma3"][0], "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    changed = of_model(config, fields, get_layers_start_end_indices=lambda _: (0, 6))
    changed.additional_config = {"kvfold": {"recipe": "int4:centre=false,skip=2"}}
    with pytest.raises(
        ValueError, match=r"with sliding layers, vLLM needs packed layers of one size, .* differ: leave out skip"
    ):
        plan.make_plan(changed)


@pytest.mark.parametrize(("rank", "packed", "sliding"), [(0, [2], 2), (1, [5], 2)])
def test_a_rank_of_a_pipeline_packs_its_own_layers(config, rank, packed, sliding):
    fields = {**SIZES, **HYBRIDS["Gemma3"][0], "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    changed = of_model(config, fields, get_layers_start_end_indices=lambda _: (3 * rank, 3 * rank + 3))
    changed.additional_config = {"kvfold": {"recipe": "int4:centre=false"}}
    made = plan.make_plan(changed)
    assert list(made.codecs) == packed
    assert f"1 packed ({packed[0]}), {sliding} sliding as the engine has them" in made.report(8, 0)
    assert made.token_bytes == 2 * 2 * (16 + 4)


@pytest.mark.parametrize(
    ("model", "ranks", "refused"),
    [("Gemma3", 2, False), ("Gemma3", 3, True), ("Gemma3n", 2, True), ("GptOss", 2, False), ("GptOss", 4, True)],
)
def test_a_pipeline_needs_ranks_that_are_alike(config, model, ranks, refused):
    """Else blocks of one group would have different sizes, or none to pack, or a target on another rank."""
    changed = of_model(config, tiny(model).config.to_dict())
    changed.parallel_config = copy.copy(config.parallel_config)
    changed.parallel_config.pipeline_parallel_size = ranks
    with pytest.raises(ValueError, match="each rank of a pipeline needs layers") if refused else nullcontext():
        plan.refuse(changed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_no_other_packing(config, dtype):
    changed = copy.copy(config)
    changed.cache_config = copy.copy(config.cache_config)
    changed.cache_config.cache_dtype = dtype
    plan.refuse(changed)


@pytest.mark.parametrize(
    ("scheme", "given", "becomes"),
    [
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3", "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "auto", "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "float16", "float16"),
        ({"quant_method": "compressed-tensors"}, "auto", "auto"),
        ({"quant_method": "compressed-tensors"}, "fp8_e5m2", "fp8_e5m2"),
        (None, "auto", "auto"),
    ],
)
def test_a_checkpoint_does_not_choose_the_dtype_of_the_cache(scheme, given, becomes):
    stated = SimpleNamespace(quantization_config=scheme)
    model = SimpleNamespace(hf_config=stated, hf_text_config=stated, dtype=torch.bfloat16)
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype=given))
    plugin._override_checkpoint(config)
    assert config.cache_config.cache_dtype == becomes


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("saw-int5", "unknown recipe 'saw-int5'"),
        ("kivi-2", "kivi-2 is for evaluation, as no kernel stores it"),
        ("hessian-int4", "was not calibrated for hessian-int4"),
    ],
)
def test_recipes_that_are_refused(config, artifact, recipe, reason):
    changed = copy.copy(config)
    changed.additional_config = {"kvfold": {"recipe": recipe, "artifact": artifact}}
    with pytest.raises(ValueError, match=reason):
        plan.make_plan(changed)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sliding_window": 128}, "a sliding window"),
        ({"attn_type": "encoder_only"}, "bidirectional"),
        ({"chunk_lookback": 1}, "chunk lookback"),
    ],
)
def test_layers_that_are_refused(options, what):
    with pytest.raises(ValueError, match=f"attention with {what}"):
        backend.PackedImpl(9, 64, 0.125, 3, **options)


def other_weights(artifact: str, folder: Path) -> None:
    """An artifact that says it was made for a model of the same shape with other weights."""
    shutil.copytree(artifact, folder)
    metadata = json.loads((folder / "kvfold.json").read_text())
    metadata["model"]["weights"] |= {"norm.weight": "0" * 16}
    (folder / "kvfold.json").write_text(json.dumps(metadata))


def test_an_artifact_of_other_weights_is_refused(config, artifact, tmp_path):
    other_weights(artifact, tmp_path / "artifact")
    changed = copy.copy(config)
    changed.additional_config = {"kvfold": {"recipe": "saw-int4", "artifact": str(tmp_path / "artifact")}}
    with pytest.raises(ValueError, match=r"made for another model: its weights are others, norm\.weight"):
        plan.make_plan(changed)


def test_another_version_is_served_if_it_has_the_hooks(config, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    plan.refuse(config)
    monkeypatch.delattr(AttentionBackend, "customize_spec")
    with pytest.raises(
        ValueError, match=r"vLLM 0\.33\.1 has no AttentionBackend\.customize_spec; .* tested with 0\.32"
    ):
        plan.refuse(config)


NOT_STARTED = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
WAITED = Exception(
    "WorkerProc initialization failed due to an exception in a background process."
)  # the worker's parent


@pytest.mark.parametrize(
    ("recorded", "raised", "last"),
    [
        ([ValueError("kvfold: too\nlarge"), WAITED], NOT_STARTED, "^too large$"),
        ([KeyError("weight"), WAITED], NOT_STARTED, "^KeyError: 'weight'$"),
        ([WAITED], NOT_STARTED, "ended without a word, as it does if the machine's memory is full$"),
        ([], NOT_STARTED, "ended without a word"),
        ([], ValueError("what the main process refuses"), "^what the main process refuses$"),
        ([], KeyboardInterrupt(), "^the server was ended before it had started$"),
    ],
)
def test_the_first_process_that_fails_says_why(monkeypatch, recorded, raised, last):
    def fail(_: object) -> None:
        for error in recorded:
            start.record(error)
        raise raised

    monkeypatch.setattr(serve_vllm.ServeSubcommand, "cmd", fail)
    monkeypatch.setattr(serve_vllm, "engine_utils", SimpleNamespace(zmq_socket_ctx=None))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ValueError, match=last):
        serve_vllm._run(SimpleNamespace())


def test_what_the_plugin_refuses_in_a_process_of_vllm_is_told(config, tmp_path, monkeypatch):
    monkeypatch.setenv(start.CAUSES, str(tmp_path / "causes"))
    changed = copy.copy(config)
    changed.cache_config = copy.copy(config.cache_config)
    changed.cache_config.cache_dtype = "fp8"
    with pytest.raises(SystemExit):
        plugin.check(changed)
    assert (tmp_path / "causes").read_text().startswith("--kv-cache-dtype fp8 packs the cache in another way")


# What vLLM loads

MAKE = f"EngineArgs({str(embedded_folder())!r}, dtype='float32').create_engine_config()"
IMPORTS = f"""
import os, sys
os.environ |= {{"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}}
from vllm import plugins
from vllm.engine.arg_utils import EngineArgs
{MAKE}
del os.environ["VLLM_PLUGINS"]
plugins.plugins_loaded = False
"""
ASK = MAKE.replace("'float32'", "'float32', additional_config={'kvfold': {'recipe': 'int4'}}")
GPU = "from vllm.platforms import current_platform; type(current_platform).is_cpu = lambda _: False; "  # a stand-in
OTHER = "from vllm.v1.attention.backends import registry; "
OTHER += "registry.register_backend(registry.AttentionBackendEnum.CUSTOM, 'other.Backend'); "  # as another plugin does
UNUSED = f"""
from types import SimpleNamespace
from prometheus_client import REGISTRY
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
{OTHER}
with set_current_vllm_config({MAKE}):
    print(AttentionBackendEnum.CPU_ATTN.get_class().__module__)
print(AttentionBackendEnum.CUSTOM.get_path())
selector = SimpleNamespace(use_sparse=False, use_mla=False)
print(current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selector))
print(*sorted(name for name in sys.modules if name.startswith("kvfold")))
print(*[metric.name for metric in REGISTRY.collect() if "kvfold" in metric.name])
"""
BROKEN = "sys.modules['kvfold.format.layout'] = None; "
MOVED = "import vllm.v1.attention.backends.registry as registry; del registry.register_backend; "
PER_KIND = "{'backend_per_kind': {'full_attention': 'TRITON_ATTN'}}"
OWN = ASK.replace("dtype", f"attention_config={PER_KIND.replace('full_attention', 'sliding_window')}, dtype")
ENDS = [  # KVFOLD_RECIPE, what is run, and what the last line names
    ("", BROKEN + ASK, "kvfold.format.layout"),
    ("int4", BROKEN + MAKE, "kvfold.format.layout"),
    ("", MOVED + ASK, "register_backend"),
    ("int4", MOVED + MAKE, "register_backend"),
    ("int5", MAKE, "unknown recipe 'int5'"),
    ("int4", OTHER + MAKE, "another plugin has the backend CUSTOM, other.Backend: set VLLM_PLUGINS=kvfold"),
    ("", GPU + ASK.replace("dtype", "attention_backend='FLASH_ATTN', dtype"), "--attention-backend FLASH_ATTN"),
    ("", GPU + ASK.replace("dtype", f"attention_config={PER_KIND}, dtype"), "--attention-backend TRITON_ATTN"),
]
SERVE = f"""
from kvfold.engines.serving import Config
from kvfold.engines.vllm.serve_vllm import serve
from kvfold.recipes import parse
serve({str(embedded_folder())!r}, "embedded", Config(parse("int4:centre=false")), [])
"""


@pytest.fixture(scope="module")
def starts() -> list[Ended]:
    """Of vLLM."""
    kinds = "print(chosen.backend, *(str(backend) for backend in chosen.backend_per_kind.values()))"
    others = UNUSED, MOVED + MAKE, *(f"{GPU}chosen = {made}.attention_config; {kinds}" for made in (MAKE, ASK, OWN))
    ends = [({RECIPE: recipe}, code) for recipe, code, _ in ENDS]
    return forked(IMPORTS, [*(({}, code) for code in others), *ends, ({"VLLM_PLUGINS": ""}, SERVE)])


def test_nothing_changes_where_nothing_asks_for_kvfold(starts):
    assert starts[0].printed.splitlines() == [
        "vllm.v1.attention.backends.cpu_attn",
        "other.Backend",
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
        "kvfold kvfold.engines kvfold.engines.start kvfold.engines.vllm kvfold.engines.vllm.configuration "
        "kvfold.engines.vllm.plugin",
        "",
    ], starts[0].errors


def test_what_kvfold_cannot_register_stops_nobody_who_does_not_ask_for_it(starts):
    assert starts[1].status == 0, starts[1].errors


def test_a_recipe_chooses_the_backend_on_a_gpu(starts):
    """For layers with full attention. For the others, vLLM or the user chooses."""
    *plain, own = [start.printed for start in starts[2:5]]
    assert plain == ["None\n", "AttentionBackendEnum.CUSTOM None None\n"]
    assert own.startswith("AttentionBackendEnum.CUSTOM AttentionBackendEnum.TRITON_ATTN None")


@pytest.mark.parametrize(("number", "named"), [(i, named) for i, (_, _, named) in enumerate(ENDS, 5)])
def test_what_fails_while_kvfold_is_loaded_ends_vllm_with_one_line(starts, number, named):
    assert starts[number].status == 1
    *_, last = starts[number].errors.splitlines()
    assert last.startswith("kvfold cannot serve this: ")
    assert named in last
    assert "Traceback" not in starts[number].errors


def test_the_server_needs_the_plugin(starts):
    assert starts[-1].errors.endswith("install kvfold with pip, and see VLLM_PLUGINS\n")


def test_the_server_refuses_in_one_line(artifact, tmp_path):
    other_weights(artifact, folder := tmp_path / "artifact")
    with kvfold("serve", "embedded", "-r", "int4", "--artifact", str(folder)) as server:
        printed = server.communicate()[0].splitlines()
    assert server.returncode == 1
    assert printed[-1].startswith("error: the artifact was made for another model: its weights are others")
    assert not any(word in each for each in printed for word in ("Traceback", "EngineCore"))


def test_the_server_says_in_one_line_that_vllm_cannot_be_imported(tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('vllm is broken')")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with kvfold("serve", "embedded", "-r", "int4", env={**os.environ, "PYTHONPATH": path}) as server:
        assert server.communicate()[0] == "error: vllm is broken\n"
    assert server.returncode == 1


def test_flags_of_the_kubernetes_example_are_flags_of_vllm():
    model, *flags = container()["args"]
    own = [flag for flag in flags if not flag.startswith("--recipe=")]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([model, *own])
    assert (parsed.model_tag, parsed.host, parsed.port) == (model, "0.0.0.0", 8000)
    assert (parsed.max_model_len, parsed.max_num_seqs) == (32768, 64)
