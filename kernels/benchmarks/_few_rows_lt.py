"""cuBLASLt by ctypes: all kernels that its heuristics would choose from for a product, not their first choice alone.

The functions and structures are those of `cublasLt.h` (CUDA 12 and 13).
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

_BF16, _FP32, _COMPUTE_32F, _OP_T = 14, 0, 68, 1
_TRANSA, _MAX_WORKSPACE = 3, 1
_CONFIG = {"id": 0, "tile": 1, "splits": 2, "stages": 6, "cluster": 8}
_WORKSPACE = 32 << 20


class _Algo(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Found(ctypes.Structure):
    _fields_ = [
        ("algo", _Algo),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: {what} returned status {status}")


class LtProduct:
    """`y = x W^T` of one shape in bf16, by each of cuBLASLt's kernels.

    Args:
        rows: of x.
        outputs: rows of W.
        width: of both.
        row: numbers between x's rows.
        most: kernels asked for.

    Raises:
        RuntimeError: cuBLASLt refuses.
        OSError: there is no cuBLASLt.
    """

    def __init__(self, rows: int, outputs: int, width: int, row: int, most: int = 24):
        major = (torch.version.cuda or "13").split(".")[0]
        self.lib: Any = ctypes.CDLL(f"libcublasLt.so.{major}")
        self.handle, self.desc = c_void_p(), c_void_p()
        _check(self.lib.cublasLtCreate(byref(self.handle)), "Create")
        _check(self.lib.cublasLtMatmulDescCreate(byref(self.desc), _COMPUTE_32F, _FP32), "MatmulDescCreate")
        transposed = c_int32(_OP_T)
        _check(
            self.lib.cublasLtMatmulDescSetAttribute(self.desc, _TRANSA, byref(transposed), c_size_t(4)), "SetAttribute"
        )
        # Columns first: W is `width x outputs`, transposed; x is `width x rows`; y is `outputs x rows`.
        self.w = self._layout(width, outputs, width)
        self.x = self._layout(width, rows, row)
        self.y = self._layout(outputs, rows, outputs)
        preference = c_void_p()
        _check(self.lib.cublasLtMatmulPreferenceCreate(byref(preference)), "PreferenceCreate")
        room = c_size_t(_WORKSPACE)
        _check(
            self.lib.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE, byref(room), c_size_t(8)),
            "PreferenceSetAttribute",
        )
        found, count = (_Found * most)(), c_int()
        _check(
            self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.desc, self.w, self.x, self.y, self.y, preference, c_int(most), found, byref(count)
            ),
            "AlgoGetHeuristic",
        )
        self.found = [each for each in found[: count.value] if each.state == 0]
        self.workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")
        self.one, self.zero = c_float(1.0), c_float(0.0)

    def _layout(self, rows: int, columns: int, leading: int) -> c_void_p:
        layout = c_void_p()
        _check(
            self.lib.cublasLtMatrixLayoutCreate(
                byref(layout), c_int(_BF16), c_uint64(rows), c_uint64(columns), ctypes.c_int64(leading)
            ),
            "MatrixLayoutCreate",
        )
        return layout

    def name(self, number: int) -> str:
        """What is known of a kernel: numbers of cuBLASLt's own lists."""
        parts = []
        for name, attribute in _CONFIG.items():
            value, written = c_uint64(0), c_size_t()
            size = 2 if name == "cluster" else 4
            self.lib.cublasLtMatmulAlgoConfigGetAttribute(
                byref(self.found[number].algo), c_int(attribute), byref(value), c_size_t(size), byref(written)
            )
            parts.append(f"{name} {value.value}")
        return f"{number}: " + " ".join(parts)

    def __call__(self, number: int, x: Tensor, weight: Tensor) -> Tensor:
        """By the `number`th kernel, on the current stream."""
        y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        _check(
            self.lib.cublasLtMatmul(
                self.handle, self.desc, byref(self.one), c_void_p(weight.data_ptr()), self.w, c_void_p(x.data_ptr()),
                self.x, byref(self.zero), c_void_p(y.data_ptr()), self.y, c_void_p(y.data_ptr()), self.y,
                byref(self.found[number].algo), c_void_p(self.workspace.data_ptr()), c_size_t(_WORKSPACE),
                c_void_p(torch.cuda.current_stream().cuda_stream),
            ),
            "Matmul",
        )  # fmt: skip
        return y
