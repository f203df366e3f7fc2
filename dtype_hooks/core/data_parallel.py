"""What a change of a parameter's dtype means to wrappers that share parameters between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if torch.distributed.is_available():  # some builds come without
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor


def renew_reducers(model: nn.Module) -> int:
    """Let every ``DistributedDataParallel`` in ``model`` (itself included) reduce the parameters as they are now.

    DDP hooks its reducer to the gradient accumulators of its parameters. Changing a parameter's dtype through
    ``p.data`` makes a new accumulator that the old reducer never hears of: gradients stay unreduced and the ranks
    drift apart, in part without any error. The wrapper object, its settings and its communication hooks stay; its
    reducer is built anew, as DDP itself does when it is unpickled. To be called on every rank, between iterations.

    Returns:
        How many wrappers were renewed.
    """
    wrappers = list(_data_parallel_wrappers(model))
    for wrapper in wrappers:
        _renew(wrapper)
    return len(wrappers)


def sharded_by(model: nn.Module) -> str | None:
    """``"FSDP1"`` or ``"FSDP2"`` where one of them shards parameters below ``model``, ``"DTensor"`` for others."""
    if not torch.distributed.is_available():
        return None
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return "FSDP1"
        if isinstance(module, FSDPModule):
            return "FSDP2"
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "DTensor"
    return None


def unit_out_of_reach(module: nn.Module, is_overridden: Callable[[nn.Module], bool]) -> str | None:
    """The name below ``module`` of an FSDP2 unit that an override of ``module`` does not reach, or None.

    A unit puts its gathered parameters in place when it is called, over whatever an override further up has put
    there, and may cast its inputs (``MixedPrecisionPolicy``). An override of the unit itself comes after that.

    Args:
        module: An overridden module.
        is_overridden: Whether a module has an override of its own.
    """
    if not torch.distributed.is_available():
        return None
    for name, child in module.named_children():
        if is_overridden(child):
            continue  # looked at on its own
        if isinstance(child, FSDPModule):
            return name
        below = unit_out_of_reach(child, is_overridden)
        if below is not None:
            return f"{name}.{below}"
    return None


def _data_parallel_wrappers(model: nn.Module) -> Iterator[DistributedDataParallel]:
    for module in model.modules():
        # mmengine's MMSeparateDistributedDataParallel is one by class, but only its children have reducers.
        if isinstance(module, DistributedDataParallel) and "reducer" in module.__dict__:
            yield module


def _renew(wrapper: DistributedDataParallel) -> None:
    wrapper.reducer._remove_autograd_hooks()
    parameters, expect_sparse_gradient = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse_gradient, names, wrapper.static_graph)
    if wrapper.static_graph:  # the helper takes it for its logs alone
        wrapper.reducer._set_static_graph()
        # A reducer's first backward on a static graph reduces at the end, once it knows which gradients come.
        wrapper._static_graph_delay_allreduce_enqueued = False
        if wrapper.logger is not None:
            wrapper.logger._set_static_graph()
    hooks, wrapper._comm_hooks = wrapper._comm_hooks, []
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
