"""SGLang: it loads `entry.py`, which installs `hooks.py`. `packed_pool.py` has the pages, `attention.py` reads them."""

from logging import getLogger

logger = getLogger("sglang.kvfold")  # a child of SGLang's logger, so that it is shown
