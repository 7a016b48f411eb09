"""SGLang: `plugin.py` is what SGLang loads at start, `backend.py` the pool and the attention backend that it gets."""
