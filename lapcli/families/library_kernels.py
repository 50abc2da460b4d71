"""Which implementations a stock transformers model runs, and the PyTorch ones where a fast package cannot run.

transformers binds functions of `fla`, `causal_conv1d` and `mamba_ssm` when a model's module is imported, for the
packages that are installed, whatever the device. On a CPU those fail ("0 active drivers"), so the module's own PyTorch
functions, which transformers keep behind each binding, take their place in the module's namespace; for a GPU the
bindings come back. Where the `kernels` package is installed too, each binding lies in an `nn.Module` of its own. No
file of the library is touched.
"""

import inspect
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from torch import nn

_BOUND_IN = "hub_kernels"
_saved: dict[tuple[str, str], Any] = {}


def choose_kernels(model: nn.Module, device_type: str, *, without: Collection[str] = ()) -> tuple[str, ...]:
    """Let a model's library functions be those that run on such a device.

    Args:
        model: any model; those that transformers did not define are left alone.
        device_type: `"cpu"`, or that of a GPU.
        without: packages that are not to run on a GPU either.

    Returns:
        The functions for which PyTorch's took the place of a package's now.
    """
    replaced: list[str] = []
    for module in _library_modules(model):
        for name, value in list(vars(module).items()):
            key = (module.__name__, name)
            function = _bound(value)
            if function is not None and (device_type == "cpu" or _package(function) in without):
                if _package(function) != "PyTorch":
                    replaced.append(f"{_package(function)}'s {_name(function, name)}")
                _saved[key] = value
                setattr(module, name, inspect.unwrap(function))
            elif device_type != "cpu" and key in _saved and not without:
                setattr(module, name, _saved.pop(key))
    return tuple(replaced)


def kernels_of(model: nn.Module) -> dict[str, str]:
    """What runs each of a model's replaceable library functions: a package's name, or `"PyTorch"`."""
    found: dict[str, str] = {}
    for module in _library_modules(model):
        for name, value in vars(module).items():
            function = _bound(value)
            if function is not None:
                found[_name(function, name)] = _package(function)
            elif (module.__name__, name) in _saved:
                found[name] = "PyTorch"
    return found


def _library_modules(model: nn.Module) -> list[ModuleType]:
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def _name(function: Callable[..., Any], otherwise: str) -> str:
    """What a package calls the function that a binding stands for."""
    return str(inspect.getclosurevars(function).nonlocals.get("func_name", otherwise))


def _package(function: Callable[..., Any]) -> str:
    """The package whose function a binding calls, or `"PyTorch"`."""
    inside = inspect.getclosurevars(function).nonlocals
    if not inside.get("is_new_implementation"):
        return "PyTorch"
    return str(inside.get("package", "a package")).partition(".")[0]


def _bound(value: Any) -> Callable[..., Any] | None:
    """The function that transformers put in the place of a PyTorch function, out of its module if it is in one."""
    if isinstance(value, nn.Module) and hasattr(type(value), "kernel_layer_name"):
        value = inspect.getclosurevars(type(value).forward).nonlocals.get("func")
    code = getattr(value, "__code__", None)
    bound = hasattr(value, "__wrapped__") and code is not None and _BOUND_IN in code.co_filename
    return value if bound else None
