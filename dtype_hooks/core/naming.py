"""Names of a model's modules, free of what wrappers put in front of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtype_hooks.errors import OverrideError

WRAPPER_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What ``torch.compile``, ``checkpoint_wrapper`` and FSDP1 call the module that they wrap (torch 2.6 to 2.13)."""


def wrapped_child(module: nn.Module) -> nn.Module | None:
    """The module that ``module`` merely wraps, or None when it is no wrapper.

    Raises:
        OverrideError: For a ``DataParallel`` over several devices. Its replicas are shallow copies that would
            all run the first device's module.
    """
    if len(module._modules) == 1:  # with more children it is somebody's own module
        for name in WRAPPER_CHILDREN:
            if name in module._modules:
                return module._modules[name]
    if isinstance(module, DistributedDataParallel):
        return module.module
    if isinstance(module, DataParallel):
        if len(module.device_ids) > 1:
            raise OverrideError(
                f"model: got DataParallel over devices {list(module.device_ids)}; expected one device a process. "
                "Use DistributedDataParallel (torchrun)."
            )
        return module.module
    return None


def bare_module(module: nn.Module) -> nn.Module:
    """``module`` without any number of wrappers around it."""
    while (inner := wrapped_child(module)) is not None:
        module = inner
    return module


def named_bare_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(dotted name, module)`` of the bare model and all below it, in order of registration.

    Like ``nn.Module.named_modules(remove_duplicate=False)``, with wrappers of any depth passed through: the
    name of a wrapped module is the wrapper's own. A module that is reachable under several names comes once
    under each. The root's name is ``""``.
    """
    yield from _walk("", model, ())


def _walk(name: str, module: nn.Module, ancestors: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    module = bare_module(module)
    if any(module is ancestor for ancestor in ancestors):  # a child that holds its parent
        return
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            path = f"{name}.{child_name}" if name else child_name
            yield from _walk(path, child, (*ancestors, module))


def class_name(module: nn.Module) -> str:
    """The name of the class that the user wrote.

    ``torch.nn.utils.parametrize`` and FSDP2's ``fully_shard`` put a subclass made on the fly in its place
    (``ParametrizedLinear``, ``FSDPLinear``); the class below that is meant.
    """
    cls = type(module)
    while _made_on_the_fly(cls):
        cls = next(base for base in cls.__mro__[1:] if base.__name__ != "FSDPModule")
    return cls.__name__


def _made_on_the_fly(cls: type) -> bool:
    base = cls.__mro__[1]
    if cls.__name__ == f"Parametrized{base.__name__}":
        return cls.__module__ == "torch.nn.utils.parametrize"
    return base.__name__ == "FSDPModule" and len(cls.__bases__) == 2
