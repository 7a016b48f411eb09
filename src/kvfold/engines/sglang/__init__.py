"""SGLang: it loads `entry.py`, which installs `hooks.py`. `attention.py` has the pool and the attention backend."""
