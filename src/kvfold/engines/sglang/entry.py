"""The entry point of SGLang's plugins. Nothing changes unless KVFOLD_RECIPE is set.

If the recipe needs an artifact, KVFOLD_ARTIFACT names it.

If a plugin fails, SGLang only logs it and serves without it. So a failure here ends the process with one line.
"""

import os

from kvfold.engines.start import RECIPE, aborting


@aborting
def register() -> None:
    """Called by SGLang in each process, before it reads its arguments."""
    if os.environ.get(RECIPE):
        from kvfold.engines.sglang.hooks import install

        install()
