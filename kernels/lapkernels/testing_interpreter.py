"""Triton's interpreter, quicker and in its newest releases too: for processes that test kernels in it."""

from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Let the interpreter prepare `triton.language` once a launch, and not at every call of a device function too.

    Triton 3.7 looks through all members of its language at each such call, `tl.sum`'s as well, though the launch around
    it has prepared them: a third of the time that tests spend in the interpreter. A third of the rest went into
    looking for overflow of integers, whose outcome counts with `debug` alone, and into a table of types made anew for
    each operation. What kernels compute is the same. Where the interpreter is built otherwise, it stays as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    parts: Any = interpreter
    _true_masks(parts.InterpreterBuilder)
    _types_known_once(parts)
    _overflows_where_asked_for()
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


def _types_known_once(interpreter: Any) -> None:
    """Let the numpy type of each scalar type be looked up in one table."""
    import triton.language as tl

    make = getattr(interpreter, "_get_np_dtype", None)
    if make is None:
        return
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        scalar: Any = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):
            return make(scalar)
        if scalar.name not in known:
            known[scalar.name] = make(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = np_dtype


def _overflows_where_asked_for() -> None:
    """Let integers be checked for overflow only where the outcome is looked at, which is with `debug`."""
    try:
        from triton.language.semantic import TritonSemantic
    except ImportError:
        return
    semantic: Any = TritonSemantic
    check = getattr(semantic, "binary_op_sanitize_overflow_impl", None)
    if check is None:
        return

    def asked_for(self: Any, left: Any, right: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check(self, left, right, operation)

    semantic.binary_op_sanitize_overflow_impl = asked_for
