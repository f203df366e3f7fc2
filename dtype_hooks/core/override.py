"""Overrides put on modules and taken off: chosen layers compute in a dtype, whatever autocast says."""

from __future__ import annotations

import inspect
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dtype_hooks.errors import ConfigError, OverrideError, SelectionError

from .dtypes import dtype_name, resolve_dtype
from .naming import bare_module, named_bare_modules
from .overridden_method import Claim, OverriddenMethod
from .selection import Selected, Selection, SelectionResult, as_patterns, require_alive, select

CAST_INPUTS = ("first", "all")


@dataclass(frozen=True)
class OverrideRule:
    """What is asked for, validated and without a model; build it with :meth:`make`."""

    selection: Selection
    dtype: torch.dtype
    methods: tuple[str, ...] = ("forward",)
    cast_inputs: str = "first"
    strict: bool = False
    name: str = "override_dtype"

    @classmethod
    def make(
        cls,
        patterns: str | Sequence[str] | None = None,
        class_patterns: str | Sequence[str] | None = None,
        dtype: str | torch.dtype = "float32",
        methods_to_override: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        cast_inputs: str = "first",
        strict: bool = False,
        name: str = "override_dtype",
    ) -> OverrideRule:
        """Validate the arguments of :func:`override_dtype`.

        Raises:
            ConfigError: For an unknown dtype, a broken regex, or a value of the wrong type.
        """
        if cast_inputs not in CAST_INPUTS:
            raise ConfigError(
                f"{name}.cast_inputs: got {cast_inputs!r}; expected 'first' or 'all'. 'first' casts the first "
                "positional tensor, 'all' every floating tensor in the arguments."
            )
        return cls(
            Selection.make(patterns, class_patterns, exclude, where=name),
            resolve_dtype(dtype, f"{name}.dtype"),
            _as_methods(methods_to_override, f"{name}.methods_to_override"),
            cast_inputs,
            as_bool(strict, f"{name}.strict"),
            name,
        )

    def install(self, model: nn.Module, warn: bool = True) -> OverrideHandle:
        """Put the override on every selected module of ``model``; see :func:`override_dtype`."""
        handle = OverrideHandle(self, model, warn)
        handle.refresh()
        return handle

    def __str__(self) -> str:
        return f"{self.name}({self.selection}, dtype={dtype_name(self.dtype)!r})"


@dataclass(frozen=True)
class OverrideRecord:
    """One overridden method.

    Attributes:
        names: Every dotted name of the module, more than one when it is shared.
        module: The module.
        method: The method's name.
        caught_by: The patterns that caught the module.
        override: What now lies in its place.
    """

    names: tuple[str, ...]
    module: nn.Module
    method: str
    caught_by: tuple[str, ...]
    override: OverriddenMethod


@dataclass
class OverrideHandle:
    """Overrides as installed on one model; ``remove()`` takes them off. Usable in ``with``.

    Attributes:
        rule: What was asked for.
        model: The model it was asked of.
        warn: Whether calls that the rule does not cover warn at once; if not, read :meth:`notes`.
        records: The overridden methods, in order of the model's modules.
        warnings: Sentences about patterns and methods that took nothing.
    """

    rule: OverrideRule
    model: nn.Module
    warn: bool = True
    records: list[OverrideRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    total: int = 0
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _kept_out: list[tuple[nn.Module, str]] = field(default_factory=list)
    _hooks: dict[int, RemovableHandle] = field(default_factory=dict)

    def refresh(self) -> None:
        """Select once more and override what is not yet; safe to call any number of times.

        Needed when modules were added to the model or replaced in it. Nothing is touched when it raises.

        Raises:
            SelectionError: Two rules claim a method with different dtypes; under ``strict``, a dead pattern.
            OverrideError: A selected module cannot be overridden.
        """
        result = select(self.model, self.rule.selection)
        if self.rule.strict:
            require_alive(result, self.rule.name)
        plan = list(self._plan(result))
        for selected, method in plan:
            self._check(selected, method)
        gone = [r for r in self.records if not any(r.module is s.module and r.method == m for s, m in plan)]
        self._let_go((record.module, record.method) for record in gone)
        self._install(plan, result)
        self.total = result.total
        self.warnings = self._warnings(result)
        link(self.model)

    def remove(self) -> None:
        """Put back exactly what was there; other handles' overrides of the same methods stay."""
        self._let_go((record.module, record.method) for record in self.records)
        self._let_go(self._kept_out)
        for hook in self._hooks.values():
            hook.remove()
        self.records, self._kept_out, self._hooks = [], [], {}
        link(self.model)

    def __enter__(self) -> OverrideHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def modules(self) -> list[nn.Module]:
        """The overridden modules, each once."""
        return list({id(record.module): record.module for record in self.records}.values())

    def notes(self) -> list[str]:
        """What the first calls showed: inputs that the rule does not cast, calls that ran unwrapped."""
        return [note for record in self.records for note in record.override.notes.values()]

    def never_called(self) -> list[OverrideRecord]:
        """Overridden methods that no eager call has reached; compiled calls leave no trace."""
        return [record for record in self.records if not record.override.called]

    # ---- planning

    def _plan(self, result: SelectionResult) -> Iterator[tuple[Selected, str]]:
        for selected in result.taken:
            for method in self.rule.methods:
                if has_method(selected.module, method):
                    yield selected, method

    def _check(self, selected: Selected, method: str) -> None:
        where = f"{self.rule.name}: {selected.names[0]}.{method}"
        check_overridable(selected.module, method, where)
        present = find_override(selected.module, method)
        for claim in present.claims if present is not None else ():
            if claim.dtype is not None and claim.dtype is not self.rule.dtype and claim.owner != self._id:
                raise SelectionError(
                    f"{self.rule.name}: {claim.label!r} ({dtype_name(claim.dtype)}) and {selected.caught_by[0]!r} "
                    f"({dtype_name(self.rule.dtype)}) both claim '{selected.names[0]}.{method}'. Narrow one of them."
                )

    def _warnings(self, result: SelectionResult) -> list[str]:
        name = self.rule.name
        if self.rule.selection.is_empty:
            return [
                f"{name}: no patterns and no class_patterns: nothing is overridden. Name modules, such as ['norm']."
            ]
        messages = result.dead_messages(name)
        have = {record.method for record in self.records}
        for method in self.rule.methods:
            if result.taken and method not in have:
                messages.append(
                    f"{name}.methods_to_override: none of the {len(result.taken)} selected modules has a method "
                    f"{method!r}. Mend it or drop it."
                )
        if self.rule.strict and messages:
            self.remove()
            raise SelectionError(messages[0])
        if not result.taken and not messages:
            messages.append(
                f"{name}: exclude takes away all that the patterns match: nothing is overridden. Narrow it."
            )
        return messages

    # ---- putting on and taking off

    def _install(self, plan: list[tuple[Selected, str]], result: SelectionResult) -> None:
        self.records = []
        for selected, method in plan:
            override = self._claim(selected.module, method, selected.caught_by[0], self.rule.dtype)
            self.records.append(
                OverrideRecord(selected.names, selected.module, method, selected.caught_by, override)
            )
        self._keep_out(result)
        self._block_fast_paths()

    def _claim(
        self, module: nn.Module, method: str, label: str, dtype: torch.dtype | None
    ) -> OverriddenMethod:
        override = find_override(module, method)
        if override is None:
            override = OverriddenMethod(module, method, module.__dict__.get(method))
            module.__dict__[method] = override
        if all(claim.owner != self._id for claim in override.claims):
            cast_all = self.rule.cast_inputs == "all" and dtype is not None
            override.claim((*override.claims, Claim(self._id, label, dtype, cast_all, self.warn)))
        return override

    def _keep_out(self, result: SelectionResult) -> None:
        """Excluded modules below an overridden one get a claim that keeps them out of it."""
        inside = {id(m) for module in self.modules for m in module.modules()}
        for selected in result.excluded:
            for method in self.rule.methods:
                if id(selected.module) in inside and has_method(selected.module, method):
                    check_overridable(
                        selected.module, method, f"{self.rule.name}: {selected.names[0]}.{method}"
                    )
                    self._claim(selected.module, method, selected.caught_by[0], None)
                    self._kept_out.append((selected.module, method))

    def _block_fast_paths(self) -> None:
        """Attached hooks make nn.TransformerEncoderLayer call its children in eval mode too.

        Otherwise its fused kernel reads their weights and no override of a child is ever reached.
        """
        for layer in bare_module(self.model).modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                below = {id(module) for module in layer.modules()} - {id(layer)}
                if id(layer) not in self._hooks and any(id(module) in below for module in self.modules):
                    self._hooks[id(layer)] = layer.register_forward_pre_hook(_no_fast_path)

    def _let_go(self, methods: Iterator[tuple[nn.Module, str]] | Sequence[tuple[nn.Module, str]]) -> None:
        for module, method in methods:
            held = find_override(module, method)
            if held is None:
                continue  # somebody has deleted it
            held.claim(tuple(claim for claim in held.claims if claim.owner != self._id))
            if not held.claims and held is module.__dict__.get(method):
                _restore(held)


def override_dtype(
    model: nn.Module,
    patterns: str | Sequence[str] | None = None,
    class_patterns: str | Sequence[str] | None = None,
    dtype: str | torch.dtype = "float32",
    *,
    methods_to_override: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    cast_inputs: Literal["first", "all"] = "first",
    strict: bool = False,
) -> OverrideHandle:
    """Make chosen modules compute in ``dtype``, regardless of autocast and of what their parameters are stored in.

    Inside an overridden method autocast is off, the first positional tensor, if floating, is cast to ``dtype``, and
    parameters and buffers of the module and all below it that are stored in another dtype are cast for the length of
    the call. Floating outputs are cast back to the dtype that the input had, through tuples, named tuples, lists,
    dicts and dataclasses. Gradients land on the stored parameters in their own dtype, bit-equal to casting by hand.

    - First positional argument an integer, bool or complex tensor (embeddings): nothing is cast in, and outputs have the
      dtypes that the module gives without the override. In a compiled region: the dtype of its first parameter.
    - First positional argument no tensor: the call runs without the override, with one warning, unless ``cast_inputs="all"``.
      Containers in which something is cast are handed on as new ones, so a method that appends to a list it was
      given appends to a copy.
    - A module that autocasts explicitly inside (its own ``with torch.autocast(...)``) does as it says there.
    - A rule on a child of an overridden module wins inside that child. An excluded module below an overridden one, with
      what is below it, computes as it would outside: autocast as it was, parameters as stored, output in its input's dtype.
    - What a method writes into a cast buffer is rounded to the buffer's stored dtype: a bf16 ``running_var`` cannot
      follow a slow average.

    Args:
        model: Any model, wrapped (DDP, ``torch.compile``, checkpoint wrappers) or not. Names are the bare model's.
        patterns: Regexes, ``re.search`` on the dotted module name. A bare string is one pattern. The root is never taken.
        class_patterns: Regexes, ``re.search`` on the class name. A module is taken when either kind matches.
        dtype: A name of :data:`~dtype_hooks.DTYPES` or a ``torch.dtype``.
        methods_to_override: Methods to wrap, ``["forward"]`` by default; those that a module lacks are passed over.
        exclude: Regexes on the dotted name; a module with a name in which one is found is not taken.
        cast_inputs: ``"first"``, or ``"all"`` for every floating tensor in args and kwargs, nested ones too.
        strict: Raise instead of warning when a pattern or a method takes nothing.

    Returns:
        A handle with ``remove()``, ``records`` and ``warnings``; leaving ``with`` removes.

    Raises:
        ConfigError: An argument that cannot be used.
        SelectionError: A method that another rule holds in another dtype; with ``strict``, a dead pattern.
        OverrideError: A scripted module, a generator or coroutine method, float64 on a device without it.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> handle = override_dtype(model, patterns=["^1$"], dtype="float32")
        >>> with torch.autocast("cpu", torch.bfloat16):  # "0" multiplies in bf16, "1" in float32
        ...     y = model(torch.ones(2, 4))
        >>> y.dtype, handle.records[0].names
        (torch.bfloat16, ('1',))
        >>> handle.remove()
    """
    rule = OverrideRule.make(
        patterns, class_patterns, dtype, methods_to_override, exclude, cast_inputs, strict
    )
    handle = rule.install(model)
    for message in handle.warnings:
        _warn(message)
    return handle


def link(model: nn.Module) -> None:
    """Tell every override in ``model`` what is below it. Run after each change; cheap, and no state of its own."""
    overrides = list(overrides_in(model))
    for override in overrides:
        inside = {id(module) for module in override.module.modules()}
        lower = [o for o in overrides if id(o.module) in inside and o.module is not override.module]
        kept_out = tuple(o for o in lower if o.dtype is None) if override.dtype is not None else ()
        override.look_below(tuple(_subtree(override)), kept_out)
        for other in lower:
            other.gate = override.gate


def overrides_in(model: nn.Module) -> Iterator[OverriddenMethod]:
    """Every override in the bare model, parents before children."""
    seen: set[int] = set()
    for _, module in named_bare_modules(model):
        if id(module) not in seen:
            seen.add(id(module))
            for value in list(module.__dict__.values()):
                found = unwrap_to_override(value)
                if found is not None and found.module is module:
                    yield found


def find_override(module: nn.Module, method: str) -> OverriddenMethod | None:
    """The override of ``module.method``, also when somebody has wrapped it since (activation checkpointing)."""
    return unwrap_to_override(module.__dict__.get(method))


def unwrap_to_override(value: Any) -> OverriddenMethod | None:
    """Follow ``__wrapped__`` (functools.wraps) and ``_torchdynamo_orig_callable`` (torch.compile) to an override."""
    while value is not None:
        if isinstance(value, OverriddenMethod):
            return value
        inside = getattr(value, "__dict__", None) or {}
        value = inside.get("__wrapped__") or inside.get("_torchdynamo_orig_callable")
    return None


def has_method(module: nn.Module, method: str) -> bool:
    """Whether there is something to override; a ModuleList has a ``forward`` that only raises."""
    if method in module.__dict__:
        return callable(module.__dict__[method])
    found = getattr(type(module), method, None)
    return callable(found) and getattr(found, "__name__", "") != "_forward_unimplemented"


def check_overridable(module: nn.Module, method: str, where: str) -> None:
    """Refuse what would not compute in the dtype, or only seem to.

    Raises:
        OverrideError: For scripted modules, static, class, generator and coroutine methods.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise OverrideError(
            f"{where}: got a scripted module; expected an eager one. Override it before torch.jit.script."
        )
    if method in module.__dict__:
        return
    found = inspect.getattr_static(type(module), method)
    kinds: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("a static method", lambda f: isinstance(f, staticmethod)),
        ("a class method", lambda f: isinstance(f, classmethod)),
        ("a generator", inspect.isgeneratorfunction),
        ("a coroutine", inspect.iscoroutinefunction),
        ("an async generator", inspect.isasyncgenfunction),
    )
    for kind, is_kind in kinds:
        if is_kind(found):
            raise OverrideError(
                f"{where}: got {kind}; expected an ordinary method, whose body runs inside the call. Exclude the module."
            )


def read_by_parent(parent: nn.Module, child_name: str) -> bool:
    """Whether the parent reads the child's weights and never calls it: nn.MultiheadAttention.out_proj."""
    return isinstance(parent, nn.MultiheadAttention) and child_name == "out_proj"


def as_bool(value: bool, where: str) -> bool:
    """Validate a flag.

    Raises:
        ConfigError: For anything but True and False.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: got {value!r}; expected True or False. Write it without quotes.")
    return value


def _as_methods(value: str | Sequence[str] | None, where: str) -> tuple[str, ...]:
    methods = ("forward",) if value is None else as_patterns(value, where)
    for method in methods:
        if not method.isidentifier() or method.startswith("__"):
            raise ConfigError(
                f"{where}: got {method!r}; expected names of ordinary methods. Write ['forward'] for calls of the module."
            )
    if not methods:
        raise ConfigError(f"{where}: got {value!r}; expected at least one method. Write ['forward'].")
    return tuple(dict.fromkeys(methods))


def _subtree(override: OverriddenMethod) -> Iterator[nn.Module]:
    """The modules whose parameters ``override`` casts: all below but those that another dtype's override holds."""
    seen: set[int] = set()
    rest = [override.module]
    while rest:
        module = rest.pop()
        seen.add(id(module))
        yield module
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            own = find_override(child, "forward")
            if own is None or own.dtype is override.dtype or read_by_parent(module, name):
                rest.append(child)
                seen.add(id(child))


def _restore(override: OverriddenMethod) -> None:
    if override.previous is None:
        del override.module.__dict__[override.name]
    else:
        override.module.__dict__[override.name] = override.previous


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """A forward pre-hook that does nothing; its presence is what counts."""


def _warn(message: str) -> None:
    warnings.warn(f"dtype_hooks: {message}", stacklevel=3)
