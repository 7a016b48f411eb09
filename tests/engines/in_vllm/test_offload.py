"""Pages that leave the cache for CPU memory and files, and come back: to the same server and to the next one."""

from pathlib import Path

import pytest
from batch_invariance import batch_invariant
from host_offload import offloading_on_a_cpu, transfer_config
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.v1.request import Request
from vllm_engine import BLOCK, Engine, answer

RECIPE = "saw-int4:block=16"
TOKENS = 2 * BLOCK + 5  # of a prompt


def start(model: Path, folder: Path, recipe: str, artifact: str | None = None) -> Engine:
    files = {"type": "fs", "root_dir": str(folder), "n_read_threads": 1, "n_write_threads": 1}
    transfer = transfer_config(spec_name="TieringOffloadingSpec", secondary_tiers=[files])
    return Engine(model, recipe, artifact, kv_transfer_config=transfer)


@pytest.fixture
def prompts(words) -> list[list[int]]:
    whole = words[750 : 750 + 2 * BLOCK]  # fills its blocks
    return [*(words[150 * i : 150 * i + TOKENS] for i in range(5)), whole]


def ask(engine: Engine, prompts: list[list[int]]) -> tuple[list[int], list[tuple[list[int], list[float]]]]:
    """One after the other: how many tokens of each were found, and the answers."""
    with batch_invariant({}):
        outputs = [engine.generate([prompt], tokens=4)[0] for prompt in prompts]
    return [output.num_cached_tokens for output in outputs], [answer(output) for output in outputs]


def leave_cpu_memory(engine: Engine) -> None:
    """When all files are written."""
    assert engine.llm.reset_prefix_cache(reset_connector=True)


def file_of(engine: Engine, prompt: list[int], block: int) -> Path:
    """The file of a block of a prompt, by vLLM's hash of the prompt up to its end."""
    (tier,) = engine.llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    request = Request("", prompt, SamplingParams(max_tokens=1), None, block_hasher=engine.core.request_block_hasher)
    (found,) = Path(tier["root_dir"]).rglob(f"{request.block_hashes[block].hex()}.bin")
    return found


def test_pages_come_back_to_the_same_server_and_to_the_next(small, small_artifact, tmp_path, prompts):
    """Not a bit of an answer differs: from CPU memory after others have taken the blocks, from files, and from files in
    another server, which begins where the first one was left as if it had been killed. A server with another recipe
    finds nothing. Damaged files are refused, and their tokens computed again.

    The last prompt comes back as a whole. vLLM computes its last token again. That token reads its open block raw,
    which never left."""
    everything, nothing = [2 * BLOCK] * len(prompts), [0] * len(prompts)
    with offloading_on_a_cpu():
        first = start(small, tmp_path, RECIPE, small_artifact)
        found, alone = ask(first, prompts)
        assert found == nothing
        with first.only(4 + first.ring):
            assert ask(first, prompts) == (everything, alone)
        leave_cpu_memory(first)
        assert ask(first, prompts) == (everything, alone)
        leave_cpu_memory(first)

        other = start(small, tmp_path, "int4:centre=false")
        found, answers = ask(other, prompts)
        assert found == nothing
        assert answers != alone
        other.close()

        second = start(small, tmp_path, RECIPE, small_artifact)
        assert ask(second, prompts) == (everything, alone)
        leave_cpu_memory(second)

        counted = REGISTRY.get_sample_value("kvfold:refused_pages")
        changed, cut, renamed, lost = (file_of(second, prompt, 1) for prompt in prompts[:4])
        stored = changed.read_bytes()
        changed.write_bytes(stored[:5000] + bytes([stored[5000] ^ 1]) + stored[5001:])
        cut.write_bytes(stored[: len(stored) // 2])
        renamed.write_bytes(file_of(second, prompts[4], 1).read_bytes())
        lost.unlink()
        assert ask(second, prompts) == ([BLOCK] * 4 + everything[4:], alone)
        assert REGISTRY.get_sample_value("kvfold:refused_pages") == counted + 3
        leave_cpu_memory(second)
        assert changed.read_bytes() == stored
        assert ask(second, prompts) == (everything, alone)
        first.close()
        second.close()
