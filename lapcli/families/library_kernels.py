"""Which implementations a stock transformers model runs, and the PyTorch ones where a fast package cannot run.

transformers binds functions of `fla`, `causal_conv1d` and `mamba_ssm` when a model's module is imported, for the
packages that are installed, whatever the device. On a CPU those fail ("0 active drivers"), so the module's own PyTorch
functions, which transformers keep behind each binding, take their place in the module's namespace; for a GPU the
bindings come back. Where the `kernels` package is installed too, each binding lies in an `nn.Module` of its own. No
file of the library is touched.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

_BOUND_IN = "hub_kernels"
_saved: dict[tuple[str, str], Any] = {}


def choose_kernels(model: nn.Module, device_type: str) -> None:
    """Let a model's library functions be those that run on such a device.

    Args:
        model: any model; those that transformers did not define are left alone.
        device_type: `"cpu"`, or that of a GPU.
    """
    for module in _library_modules(model):
        for name, value in list(vars(module).items()):
            key = (module.__name__, name)
            function = _bound(value)
            if device_type == "cpu" and function is not None:
                _saved[key] = value
                setattr(module, name, inspect.unwrap(function))
            elif device_type != "cpu" and key in _saved:
                setattr(module, name, _saved.pop(key))


def kernels_of(model: nn.Module) -> dict[str, str]:
    """What runs each of a model's replaceable library functions: a package's name, or `"PyTorch"`."""
    found: dict[str, str] = {}
    for module in _library_modules(model):
        for name, value in vars(module).items():
            function = _bound(value)
            if function is not None:
                inside = inspect.getclosurevars(function).nonlocals
                package = str(inside.get("package", "a package")).partition(".")[0]
                found[str(inside.get("func_name", name))] = (
                    package if inside.get("is_new_implementation") else "PyTorch"
                )
            elif (module.__name__, name) in _saved:
                found[name] = "PyTorch"
    return found


def _library_modules(model: nn.Module) -> list[ModuleType]:
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def _bound(value: Any) -> Callable[..., Any] | None:
    """The function that transformers put in the place of a PyTorch function, out of its module if it is in one."""
    if isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name"):
        value = inspect.getclosurevars(type(value).forward).nonlocals.get("func")
    code = getattr(value, "__code__", None)
    bound = hasattr(value, "__wrapped__") and code is not None and _BOUND_IN in code.co_filename
    return value if bound else None
