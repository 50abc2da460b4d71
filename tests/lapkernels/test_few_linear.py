"""The product of few rows, against the same in fp64."""

import os
import subprocess
import sys

import pytest
import torch

import lapkernels.few_linear.api as api
from lapkernels._triton import triton_version
from lapkernels.errors import InvalidInput, KernelUnavailable
from lapkernels.few_linear import few_linear, few_swiglu, is_faster, select_impl, why_not
from lapkernels.few_linear.configs import beats_cublas, choose
from lapkernels.testing_few import SHAPES, check, check_gated

BF16 = torch.bfloat16
LAYERS = {"output": (2048, 3072), "down": (2048, 5632), "in": (7744, 2048), "up": (11264, 2048), "head": (32000, 2048)}
"""N and D of what was measured."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16], ids=str)
def test_the_reference(shape, dtype):
    check(shape, "reference", dtype)
    check_gated(shape, "reference", dtype)


def _run(program: str, **environment: str) -> str:
    """In a process of its own: triton reads its variables once, and what compiles only launches nothing any more."""
    without = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**without, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_interpreted():
    """In fp16, whose products the interpreter gets right."""
    program = (
        "from lapkernels.testing_interpreter import quicken\nquicken()\n"
        "import torch\nfrom lapkernels.few_linear import few_linear, few_swiglu\n"
        "from lapkernels.testing_few import SHAPES, check, check_gated\n"
        "for shape in SHAPES:\n"
        "    check(shape, 'triton', torch.float16)\n"
        "    check_gated(shape, 'triton', torch.float16)\n"
        "x, w = (torch.ones(n, 1352, dtype=torch.float16) for n in (3, 70))\n"
        "assert few_linear(x, w, apart=True, impl='triton').shape == (2, 3, 70)\n"
        "assert few_linear(x[:0], w, impl='triton').shape == (0, 70)\n"
        "assert few_linear(x, w[:0], impl='triton').shape == (3, 0)\n"
        "assert few_swiglu(x[:0], w, impl='triton').shape == (0, 35)\n"
        "assert few_swiglu(x, w[:0], impl='triton').shape == (3, 0)\n"
    )
    _run(program, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.skipif(triton_version() is None, reason="triton is not installed")
def test_all_configurations_compile_for_a_hopper(tmp_path):
    """Within its shared memory, and without spills."""
    program = (
        "import torch\nfrom lapkernels.offline import compile_only, resources\ncompiled = compile_only(90)\n"
        "from lapkernels.few_linear import few_linear, few_swiglu, why_not\n"
        f"layers = {[*LAYERS.values()]}\n"
        "impls = [impl for impl in ('triton', 'gluon') if why_not(impl, 'cpu', torch.bfloat16) is None]\n"
        "assert impls[0] == 'triton'\n"
        "for impl in impls:\n"
        "    for number, (outputs, width) in enumerate(layers):\n"
        "        x, w = (torch.empty(n, width, dtype=torch.bfloat16) for n in (16 if number == 2 else 64, outputs))\n"
        "        bias = w[:, 0].clone() if number % 2 else None\n"
        "        few_linear(x, w, bias, apart=number < 2, ready=True, impl=impl)\n"
        "        if number in (2, 3):\n"
        "            few_swiglu(x, w, bias, ready=True, impl=impl)\n"
        "for took in map(resources, compiled):\n"
        "    assert took.spilled == 0 and took.programs() >= (1 if took.shared > 110 * 1024 else 2), took\n"
        "assert len(compiled) == 7 * len(impls)\n"
    )
    _run(program, TRITON_CACHE_DIR=str(tmp_path))


def test_configurations_are_those_that_were_measured():
    for impl, wanted in (
        ("triton", [(64, 64, 100, 4), (64, 64, 100, 4), (64, 128, 200, 1), (128, 64, 100, 1), (128, 64, 100, 1)]),
        ("gluon", [(128, 64, 200, 4), (128, 64, 200, 8), (64, 128, 200, 1), (128, 64, 200, 1), (128, 64, 100, 1)]),
    ):
        assert [choose(impl, *layer, at < 2) for at, layer in enumerate(LAYERS.values())] == wanted
    for impl, wanted in (("triton", [True, True, True, False, True]), ("gluon", [True] * 5)):
        for rows in (16, 32, 64):
            assert [beats_cublas(impl, rows, *layer, at < 2) for at, layer in enumerate(LAYERS.values())] == wanted
        assert not any(beats_cublas(impl, rows, *LAYERS["head"], False) for rows in (1, 8, 65, 128))
    # Gate and up together are cut as they are apart, unless Triton's tiles would be too small to be two.
    assert choose("triton", *LAYERS["in"], gated=True) == (128, 64, 100, 1)
    for impl, layer in (("triton", "up"), ("gluon", "in"), ("gluon", "up")):
        assert choose(impl, *LAYERS[layer], gated=True) == choose(impl, *LAYERS[layer])
        assert beats_cublas(impl, 64, *LAYERS[layer], gated=True) == beats_cublas(impl, 64, *LAYERS[layer])
    assert not beats_cublas("triton", 64, *LAYERS["in"], gated=True)
    # Too few programs to read at full speed, split or not, or in the second of two waves.
    assert not beats_cublas("gluon", 64, 2048, 5632, False)
    assert not beats_cublas("gluon", 64, 256, 256, True)
    assert not beats_cublas("gluon", 64, 34816, 2048, False)
    assert not beats_cublas("gluon", 64, 9280, 2048, False)


def test_what_is_refused():
    x, weight = torch.ones(65, 8), torch.ones(3, 8)
    for arguments, word in (
        ((x[:, :7], weight), "x has shape"),
        ((x.unsqueeze(0), weight), "should be"),
        ((x[:, :0], weight[:, :0]), "D should be"),
        ((x.double(), weight), "share one"),
        ((x, torch.ones(8, 3).t()), "weight has strides"),
        ((x, weight, torch.ones(4)), "bias has shape"),
    ):
        with pytest.raises(InvalidInput, match=word):
            few_linear(*arguments)
    with pytest.raises(InvalidInput, match="3 rows"):
        few_swiglu(x, weight)
    with pytest.raises(InvalidInput, match="bias has shape"):
        few_swiglu(x, weight[:2], torch.ones(1))
    for product in (few_linear, few_swiglu):
        with pytest.raises(InvalidInput, match="magic"):
            product(x, weight[:2], impl="magic")
    for given, word in (
        ((torch.float32,), "bf16 and fp16, not"),
        ((BF16, 65), "64 rows at most"),
        ((BF16, 64, 12), "D = 12"),
        ((BF16,), "CUDA device"),
    ):
        assert word in str(why_not("triton", "cpu", *given))
        assert select_impl("cpu", *given).name == "reference"
    with pytest.raises(KernelUnavailable, match="64 rows at most"):
        few_linear(x.to(BF16), weight.to(BF16), impl="triton")
    with pytest.raises(KernelUnavailable, match="64 rows at most"):
        few_swiglu(x.to(BF16), weight[:2].to(BF16), impl="triton")
    assert not is_faster(torch.ones(64, 2048, dtype=BF16), torch.ones(32000, 1, dtype=BF16).expand(-1, 2048))


def test_rows_that_begin_anywhere_are_not_for_the_kernels(monkeypatch):
    monkeypatch.setattr(api, "why_not", lambda *_: None)
    whole = torch.ones(4, 24, dtype=BF16)
    for x in (whole[:, 1:9], torch.ones(4, 12, dtype=BF16)[:, :8]):
        with pytest.raises(KernelUnavailable, match="16 bytes"):
            few_linear(x, whole[:, :8], impl="triton")
        with pytest.raises(KernelUnavailable, match="16 bytes"):
            few_swiglu(x, whole[:, :8], impl="triton")


@pytest.mark.parametrize("variable", ["", "triton", "cublas"])
def test_the_choice_on_a_gpu(monkeypatch, variable):
    """As if there were one: the kernel below Triton's language first, and what takes its place."""
    monkeypatch.setenv(api.VARIABLE, variable)
    why = {"gluon": None, "triton": None}
    monkeypatch.setattr(api, "why_not", lambda impl, *_: why[impl])

    class OnGpu(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda")

    x, weight = (torch.ones(n, 2048, dtype=BF16).as_subclass(OnGpu) for n in (64, 11264))
    assert select_impl("cuda", BF16).name == ("triton" if variable == "triton" else "gluon")
    # Gate and up are cuBLAS's where Gluon is not there.
    assert is_faster(x, weight) == is_faster(x, weight, gated=True) == (variable == "")
    assert is_faster(x, weight[:7744]) == (variable != "cublas")
    why["gluon"] = "missing"
    assert select_impl("cuda", BF16).name == "triton"
    assert not is_faster(x, weight)
    why["triton"] = "wrong"
    assert select_impl("cuda", BF16) == ("reference", "by torch: wrong")
    assert not is_faster(x, weight[:7744])


@pytest.mark.parametrize("version", [None, (3, 5, 1), (3, 8, 0)], ids=str)
def test_gluon_of_other_versions_is_left_alone(monkeypatch, version):
    monkeypatch.setattr(api, "triton_version", lambda: version)
    monkeypatch.setattr(api, "is_interpreted", lambda: False)
    assert "tried with triton 3.6" in str(api._no_gluon.__wrapped__())
