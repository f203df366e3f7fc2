"""What overrides need of ``torch.compile``: a backward that is traced outside autocast, as eager runs it."""

from __future__ import annotations

import warnings
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch._dynamo  # assume_constant_result must be in place before dynamo sees the functions below
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._functorch import config as functorch_config

T = TypeVar("T")


class BackwardAutocast:
    """Holds ``torch._functorch.config.backward_pass_autocast`` at ``"off"`` for the length of one compilation.

    AOTAutograd traces the backward under the autocast state around the compiled region ("same_as_forward"), so
    that the gradients of a float32 block inside a bf16 region are multiplied in bf16 and are wrong by up to 0.5%.
    Eager runs the backward outside autocast; "off" does the same. A value that the user chose is left alone.
    """

    OPTION = "backward_pass_autocast"  # torch >= 2.9
    TORCH_DEFAULT = "same_as_forward"

    def __init__(self) -> None:
        self._held = False
        self._warned = False

    def hold(self) -> None:
        """Called while dynamo traces an overridden method; undone when that compilation ends."""
        if not hasattr(functorch_config, self.OPTION):
            self._warn_once()
        elif torch.compiler.is_exporting():
            return  # no backward, and dynamo announces no end
        elif getattr(functorch_config, self.OPTION) == self.TORCH_DEFAULT:
            self._listen()
            setattr(functorch_config, self.OPTION, "off")
            self._held = True

    @torch._dynamo.disable
    def release(self, _: Any = None) -> None:
        """Put torch's default back; dynamo calls it at the end of every compilation.

        Dynamo calls it while it holds a lock, and possibly in the midst of compiled code (a backward is compiled when it
        first runs). Were this function compiled too, which is what ``disable`` prevents, it would wait for that lock.
        """
        if self._held:
            setattr(functorch_config, self.OPTION, self.TORCH_DEFAULT)
            self._held = False

    def _listen(self) -> None:
        handler = torch._dynamo.callback.callback_handler
        if self.release not in handler.end_callbacks:  # torch._dynamo.reset() empties the list
            handler.register_end_callback(self.release)

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"dtype_hooks: torch {torch.__version__} traces the backward of a compiled model under autocast, so "
                "gradients of overridden float32 blocks are off by up to 0.5%. Use torch >= 2.9, or compile only "
                "the parts without overrides.",
                stacklevel=2,
            )


_backward_autocast = BackwardAutocast()  # one a process, like the config that it holds


@torch._dynamo.assume_constant_result
def trace_backward_without_autocast() -> bool:
    """Hold the config; dynamo runs this while it traces instead of putting it into the graph."""
    _backward_autocast.hold()
    return True


def never_compiled_alone(code: T) -> T:
    """A decorator for a function, or a class and its methods, in which dynamo may not start a graph of its own.

    It still traces them as part of a caller's graph. Where that graph breaks inside an overridden method, dynamo would
    go on to compile our own frames one by one, with the parameters that they have put in place of others; some of those
    would stay there. As it is, the call then runs as without compile, and the user's frames below are compiled.

    A class's ``__call__`` is excepted, since ``module.compile()`` starts there: it should do nothing but call another.
    """
    if isinstance(code, type):
        for name, method in vars(code).items():
            if isinstance(method, FunctionType) and name != "__call__":
                skip_code(method.__code__)
    elif isinstance(code, FunctionType):
        skip_code(code.__code__)
    return code


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to the model, a part of it or one of their methods."""
    return any(
        isinstance(module, OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(hasattr(value, "_torchdynamo_orig_callable") for value in list(module.__dict__.values()))
        for module in model.modules()
    )
