"""Chat with a long document: read it once into a packed cache, then ask as often as you like.

    python examples/long_document.py embedded README.md "What does kvfold do?" "Which engines does it support?"

Each question gets a copy of the cache. So the document is not read again, and no question sees another one. A packed
cache is small, and copied in no time.
"""

import argparse
from copy import deepcopy
from pathlib import Path

import torch

import kvfold
from kvfold.models import load_model

CHUNK = 1024  # tokens of the document per call of the model
QUESTION = "\N{OBJECT REPLACEMENT CHARACTER}"  # where the question will stand in the chat template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="`embedded`, a model folder or a Hugging Face Hub id")
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--recipe", default="fold4")
    parser.add_argument("--tokens", type=int, help="read only so many tokens of the document")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    model, tokenizer = load_model(arguments.model)
    messages = [{"role": "user", "content": f"{QUESTION}\n\n{QUESTION}"}]
    template = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opening, between, ending = template.split(QUESTION)

    def ids(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)

    document = ids(opening + arguments.document.read_text())[:, : arguments.tokens]
    cache = kvfold.cache(model, arguments.recipe)
    with torch.inference_mode():
        for chunk in document.split(CHUNK, dim=1):
            model(chunk, past_key_values=cache, logits_to_keep=1)
    print(f"{document.shape[1]:,} tokens read, {cache.allocated_bytes / 2**20:.1f} MiB with {arguments.recipe}")

    for question in arguments.questions:
        prompt = torch.cat([document, ids(between + question + ending)], dim=1)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=deepcopy(cache),
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
        )
        print(f"\n{question}\n{tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
