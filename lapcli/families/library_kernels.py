"""Which implementations a stock transformers model runs, and the PyTorch ones where a fast package cannot run.

transformers binds functions of `fla`, `causal_conv1d` and `mamba_ssm` when a model's module is imported, for the
packages that are installed, whatever the device. On a CPU those fail ("0 active drivers"), and the names are the
module's, so all models of a class share them. A function that looks at the device of what it is given takes the place
of each binding in the module's namespace: on a CPU it calls the module's own PyTorch function, which transformers keeps
behind the binding, or what lapkernels have before it; elsewhere what they have in its place (`stand_ins`), or the
binding. Where the `kernels`
package is installed too, each binding lies in an `nn.Module` of its own. No file of the library is touched.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lapcli.errors import ModelError
from lapcli.families.stand_ins import BEFORE_PYTORCH, BY_CHANNEL, STAND_INS, stands_in, widths_of
from lapkernels.delta_rule import why_not

_BOUND_IN = "hub_kernels"
_CHOICE = "_lapcli_choice"


class _Choice:
    """What a function of a library's module runs, by the device of the first tensor that it is given.

    Attributes:
        fast: what transformers bound.
        plain: the PyTorch function behind it.
        name: what the package calls the function.
        package: whose function was bound, or `"PyTorch"`.
        without_gradient: whether it runs the package's function only where nothing asks for a gradient.
        stand_in: what goes first, and gives `None` for a call that it does not take; `None` for nothing.
        kernel: the implementation that the stand-in runs on any device, or `auto`.
    """

    def __init__(self, fast: Callable[..., Any], function: Callable[..., Any], name: str):
        self.fast = fast
        self.plain = inspect.unwrap(function)
        self.name = str(inspect.getclosurevars(function).nonlocals.get("func_name", name))
        self.package = _package(function)
        self.without_gradient = False
        self.stand_in = STAND_INS.get(self.name)
        self.kernel = "auto"

    def function(self) -> Callable[..., Any]:
        """The function itself, with the PyTorch function's name and signature."""

        @functools.wraps(self.plain)
        def by_device(*args: Any, **kwargs: Any) -> Any:
            if self.kernel != "auto":
                return STAND_INS[self.name](*args, impl=self.kernel, **kwargs)
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            device = tensors[0].device
            avoided = self.without_gradient and torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
            plain = avoided or _runs_pytorch(device) or self.package == "PyTorch"
            before = plain and device.type != "meta" and self.name in BEFORE_PYTORCH
            if self.stand_in is not None and (before or not _runs_pytorch(device)):
                found = self.stand_in(*args, **kwargs, **({"before_pytorch": True} if before else {}))
                if found is not None:
                    return found
            return (self.plain if avoided or _runs_pytorch(device) else self.fast)(*args, **kwargs)

        setattr(by_device, _CHOICE, self)
        return by_device


def choose_by_device(model: nn.Module) -> None:
    """Let a model's library functions, and those of all models of its class, be those that run where they compute.

    Args:
        model: any model; those that transformers did not define are left alone.
    """
    for module in _library_modules(model):
        for name, value in list(vars(module).items()):
            function = _bound(value)
            if function is not None:
                setattr(module, name, _Choice(value, function, name).function())


def let_lapkernels_stand_in(model: nn.Module, whether: bool) -> None:
    """Say whether lapkernels go first where they have a function of the library's; they do unless told otherwise.

    Args:
        model: any; it holds for all models of its class.
        whether: no, to measure the library as it is.
    """
    for each in _chosen(model):
        each.stand_in = STAND_INS.get(each.name) if whether else None


def replaceable(config: Mapping[str, Any]) -> set[str]:
    """The functions that transformers' model of this config calls and in whose place lapkernels have theirs."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(str(config.get("model_type")))
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError:
        return set()
    found: set[str] = set()
    for name, value in list(vars(module).items()):
        function = _bound(value)
        # As transformers bound it, or what `choose_by_device` put there.
        choice = getattr(value, _CHOICE, None) or (function and _Choice(value, function, name))
        if choice is not None and choice.name in STAND_INS:
            found.add(choice.name)
    return found


def why_not_kernel(
    kernel: str,
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    *,
    needs_gradient: bool = False,
) -> str | None:
    """Why an implementation of the delta rule cannot run in transformers' model of this config; else `None`.

    Args:
        kernel: its name, or `auto`.
        config: of the model.
        device: where it will compute.
        dtype: of the model.
        needs_gradient: whether a backward pass will follow.
    """
    if kernel == "auto":
        return None
    functions = replaceable(config)
    if not functions:
        return "transformers, which runs this model, chooses its kernels itself"
    by_channel = not functions.isdisjoint(BY_CHANNEL)
    found = (
        why_not(
            kernel, device, dtype, key_width=width, gated=True, needs_gradient=needs_gradient, by_channel=by_channel
        )
        for width in sorted({width for width, _ in widths_of(config)})
    )
    return next((each for each in found if each is not None), None)


def set_kernel(model: Any, kernel: str, device: torch.device) -> None:
    """Let an implementation of the delta rule run in transformers' model, wherever its tensors lie.

    Args:
        model: as `choose_by_device` has left it. It holds for all models of the class; one that calls no such function
            stays as it is.
        kernel: a name of `lapkernels.delta_rule`'s, or `auto`.
        device: where the model will compute.

    Raises:
        ModelError: it cannot run there.
    """
    found = [each for each in _chosen(model) if each.name in STAND_INS]
    if not found:
        return
    wrong = why_not_kernel(kernel, model.config.to_dict(), device, next(model.parameters()).dtype)
    if wrong is not None:
        raise ModelError(f"--kernel {kernel} cannot run here: {wrong}", "use --kernel auto")
    for each in found:
        each.kernel = kernel


def differentiate_without(model: nn.Module, package: str, *, keeping: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Let PyTorch's functions run in the place of a package's where a gradient is needed, on a GPU too.

    For a backward pass that is wrong on this machine; it is so for every model of the process, so this holds for all
    models of the class.

    Args:
        model: as `choose_by_device` has left it.
        package: whose functions are meant.
        keeping: those whose backward pass is right.

    Returns:
        These functions' names.
    """
    found = [each for each in _chosen(model) if each.package == package and each.name not in keeping]
    for each in found:
        each.without_gradient = True
    return tuple(f"{package}'s {each.name}" for each in found)


def kernels_of(model: nn.Module, device: torch.device | None = None, *, needs_gradient: bool = False) -> dict[str, str]:
    """What runs each of a model's replaceable library functions; of those over many tokens, over many.

    Args:
        model: any model.
        device: where it will compute, if not where its weights are; where some are on a GPU, all compute there.
        needs_gradient: whether a backward pass will follow, as far as it changes what lapkernels do.

    Returns:
        A package's name, `"lapkernels"`, `"PyTorch"`, or the implementation that was asked for, by the package's names
        of the functions.
    """
    asked = {each.name: each.kernel for each in _chosen(model) if each.kernel != "auto"}
    places = {parameter.device.type: parameter.device for parameter in model.parameters()}
    devices = [device] if device is not None else list(places.values())
    fast = next((each for each in devices if not _runs_pytorch(each)), None)
    place = fast or next((each for each in devices if each.type == "cpu"), torch.device("meta"))

    def runs(each: _Choice) -> str:
        package = each.package if fast is not None else "PyTorch"
        plain = package == "PyTorch" and place.type != "meta"
        first = each.stand_in is not None and (fast is not None or (plain and each.name in BEFORE_PYTORCH))
        if first and stands_in(each.name, model, place, needs_gradient=needs_gradient, before_pytorch=plain):
            return "lapkernels"
        return package

    return {each.name: runs(each) for each in _chosen(model)} | asked


def _runs_pytorch(device: torch.device) -> bool:
    return device.type in ("cpu", "meta")


def _chosen(model: nn.Module) -> list[_Choice]:
    """The choices of the functions of a model's modules."""
    functions = [
        each for module in _library_modules(model) for each in vars(module).values() if inspect.isfunction(each)
    ]
    return [getattr(each, _CHOICE) for each in functions if hasattr(each, _CHOICE)]


def _library_modules(model: nn.Module) -> list[ModuleType]:
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


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
