"""vLLM: `plugin.py` is what vLLM loads at start, `backend.py` the attention backend."""
