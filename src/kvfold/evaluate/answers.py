"""What each cache answers, for readers who want to see words beside numbers."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.evaluate.retrieval import Make

QUESTION = "What is the text above about? Answer in one sentence."
READ, SAID = 512, 40  # tokens: of the text that is asked about, and of an answer, at most


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, make: Make, text: Tensor) -> str:
    """The greedy answer to `QUESTION` about the beginning of `text` (1-D)."""
    prompt = prompt_inputs(tokenizer, f"{tokenizer.decode(text[:READ])}\n\n{QUESTION}")
    said = model.generate(
        **prompt.to(model.device),
        past_key_values=make(),
        max_new_tokens=SAID,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True)).strip()


def prompt_inputs(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool = False) -> Any:
    """The tokens of a prompt, in the chat template if there is one, unless the prompt is taken as it is (`raw`)."""
    if raw or not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
