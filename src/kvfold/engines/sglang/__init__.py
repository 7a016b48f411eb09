"""SGLang: it loads `entry.py`, which installs `hooks.py`. `packed_pool.py` has the pages, `attention.py` reads them."""
