"""Triton's interpreter, which runs the kernels where there is no GPU: faster, and with assertions."""

from dataclasses import replace
from types import SimpleNamespace

from triton import language
from triton.runtime import interpreter


def patch_language_once_per_launch() -> None:
    """The interpreter replaces the functions of Triton's language when it launches a kernel, and again at every call of
    a device function, which takes longer than most of these. What a launch has replaced is enough for all of them."""
    patch = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})  # also what tl.sum and others see
    interpreter._patch_lang = lambda kernel: patch(everything)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


def turn_assertions_on() -> None:
    """`tl.device_assert` asserts, as it does on a GPU with TRITON_DEBUG=1, except for overflows of integers, which the
    interpreter looks for in any case, and for longer than it computes."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, debug=True, sanitize_overflow=False)
