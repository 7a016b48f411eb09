"""Artifacts that travel: to the Hugging Face Hub or to a folder, with a card that says what they are."""
