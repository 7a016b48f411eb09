"""The entry point of SGLang's plugins: nothing changes unless KVFOLD_RECIPE, and KVFOLD_ARTIFACT beside it, ask for it.

SGLang logs what fails in a plugin and serves on without it. So what fails here ends the process with one line.
"""

import os

from kvfold.engines.start import RECIPE, aborting


@aborting
def register() -> None:
    """Called by SGLang in each of its processes, before it reads its arguments."""
    if os.environ.get(RECIPE):
        from kvfold.engines.sglang.hooks import install

        install()
