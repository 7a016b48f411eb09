"""A tiny model with random weights that `kvfold check` can read: its tokens are long enough for short haystacks."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvfold.evaluate.tool_calls import TOOLS, Record, signatures
from kvfold.text import default_text

CONTEXT = 1536


def save_model(folder: Path) -> None:
    """Weights are larger than usual, so that attention is sharp and 2 bits change answers."""
    words = Tokenizer(BPE())
    words.pre_tokenizer, words.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=1000, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<end>"])
    calls = "".join(Record(tool, "Oslo", 12345).written for tool in TOOLS)
    words.train_from_iterator([20 * signatures(), 20 * calls, text()[:50_000]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def text() -> str:
    """Text to measure on, which automatic calibration does not read."""
    return default_text("evaluation")
