"""Triton's interpreter, quicker and in its newest releases too: for processes that test kernels in it."""

from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Let the interpreter prepare `triton.language` once a launch, and not at every call of a device function too.

    Triton 3.7 looks through all members of its language at each such call, `tl.sum`'s as well, though the launch around
    it has prepared them: a third of the time that tests spend in the interpreter. What kernels compute is the same.
    Where the interpreter is built otherwise, it stays as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    parts: Any = interpreter
    _true_masks(parts.InterpreterBuilder)
    if not all(hasattr(parts, name) for name in ("_patch_lang", "_LangPatchScope", "InterpretedFunction")):
        return
    prepare = parts._patch_lang
    # Kernels see one of them, device functions of the library the other.
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise parts.InterpreterError(repr(error)) from error

    # What a launch calls first; what it changes, it takes back at its end.
    parts._patch_lang = lambda _kernel: prepare(both)
    parts.InterpretedFunction.__call__ = call


def _true_masks(builder: Any) -> None:
    """Let masks be truth values where memory is read and written.

    A comparison of scalars keeps the type of what was compared, and so does a block that it is spread over. Triton 3.9
    refuses to read memory by such a mask, earlier ones took it.
    """
    import numpy as np

    def of_truths(member: Any, place: int) -> Any:
        def access(self: Any, *args: Any, **kwargs: Any) -> Any:
            mask = args[place]
            # Those of descriptors are arrays, of truth values already.
            if not isinstance(mask, np.ndarray):
                mask.data = mask.data.astype(bool)
            return member(self, *args, **kwargs)

        return access

    builder.create_masked_load = of_truths(builder.create_masked_load, 1)
    builder.create_masked_store = of_truths(builder.create_masked_store, 2)
