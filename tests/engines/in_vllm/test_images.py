"""Images in prompts, through real vLLM: their tokens are packed as those of words."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from defined_attention import defined_attention
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import SIZES
from vllm import SamplingParams
from vllm_engine import Engine, answer

SIDE, PATCH = 28, 14  # pixels


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A random LLaVA with a processor. vLLM imports torchvision for it, and uses none of it."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "in_sglang" / "stubs")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config={**SIZES, "model_type": "llama", "vocab_size": 300},
        vision_config={**vision, "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data *= 3
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")  # under the names that published models have
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in weights.items()}
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    size = {"height": SIDE, "width": SIDE}
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(tmp_path)
    return tmp_path


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))


def ask(folder: Path, recipe: str | None) -> list[tuple[list[int], list[float]]]:
    engine = Engine(folder, recipe, max_model_len=256, mm_processor_kwargs={"backend": "pil"})
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt": "what is <image>?", "multi_modal_data": {"image": image(seed)}} for seed in (0, 1)]
    with defined_attention() as found:
        outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    engine.close()
    assert all(len(output.prompt_token_ids) == len("what is ?") + (SIDE // PATCH) ** 2 for output in outputs)
    assert found.error < 1e-5
    assert (found.queries > 0) == (recipe is not None)
    return [answer(output) for output in outputs]


def test_answers_to_images_are_those_of_stock_vllm(folder):
    """The answers to two images differ more than packing moves them."""
    stock = ask(folder, None)
    (_, one), (_, other) = stock
    assert abs(one[0] - other[0]) > 0.3
    for recipe, error in (("bf16", 0.01), ("int8:centre=false", 0.1)):
        for (tokens, logprobs), (expected, exactly) in zip(ask(folder, recipe), stock, strict=True):
            assert tokens[0] == expected[0]
            assert logprobs[0] == pytest.approx(exactly[0], abs=error)
