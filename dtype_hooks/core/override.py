"""Overrides put on modules and taken off: chosen layers compute in a dtype, whatever autocast says."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dtype_hooks.core.data_parallel import renew_reducers, sharded_by, unit_out_of_reach
from dtype_hooks.core.dtypes import dtype_name, resolve_dtype
from dtype_hooks.core.installed import (
    block_fast_path,
    check_device,
    check_overridable,
    check_shapes_known,
    find_override,
    has_method,
    layers_with_fast_path,
    link,
    never_called_by,
)
from dtype_hooks.core.naming import named_bare_modules
from dtype_hooks.core.overridden_method import Claim, OverriddenMethod
from dtype_hooks.core.selection import Selected, Selection, SelectionResult, as_patterns, select
from dtype_hooks.core.stand_in import put_in, take_out
from dtype_hooks.core.storage import (
    Stored,
    change_dtype,
    check_storage,
    claim_storage,
    flatten_rnns,
    own_tensors,
    plan_storage,
    release_storage,
)
from dtype_hooks.core.validation import as_bool, as_choice
from dtype_hooks.errors import ConfigError, OverrideError, SelectionError

CAST_INPUTS = ("first", "all")


@dataclass(frozen=True)
class OverrideRule:
    """What is asked for, validated and without a model; build it with :meth:`make`."""

    selection: Selection
    dtype: torch.dtype
    methods: tuple[str, ...] = ("forward",)
    cast_inputs: str = "first"
    strict: bool = False
    override_parameters: bool = False
    override_buffers: bool = False
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
        override_parameters: bool = False,
        override_buffers: bool = False,
        name: str = "override_dtype",
    ) -> OverrideRule:
        """Validate the arguments of :func:`override_dtype`.

        Raises:
            ConfigError: For an unknown dtype, a broken regex, or a value of the wrong type.
        """
        return cls(
            Selection.make(patterns, class_patterns, exclude, where=name),
            resolve_dtype(dtype, f"{name}.dtype"),
            _as_methods(methods_to_override, f"{name}.methods_to_override"),
            as_choice(cast_inputs, CAST_INPUTS, f"{name}.cast_inputs"),
            as_bool(strict, f"{name}.strict"),
            as_bool(override_parameters, f"{name}.override_parameters"),
            as_bool(override_buffers, f"{name}.override_buffers"),
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


@dataclass(repr=False)
class OverrideHandle:
    """Overrides as installed on one model; ``remove()`` takes them off. Usable in ``with``.

    Attributes:
        rule: What was asked for.
        model: The model it was asked of.
        warn: Whether calls that the rule does not cover warn at once; if not, read :meth:`notes`.
        records: The overridden methods, in order of the model's modules.
        stored: The parameters and buffers that are stored in the dtype, each once.
        warnings: Sentences about patterns and methods that took nothing.
    """

    rule: OverrideRule
    model: nn.Module
    warn: bool = True
    records: list[OverrideRecord] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    total: int = 0
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _kept_out: list[tuple[nn.Module, str]] = field(default_factory=list)
    _hooks: dict[int, RemovableHandle] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Select once more, override and store what is not yet; safe to call any number of times.

        Needed when modules were added to the model or replaced in it. Nothing is touched when it raises. Where a
        stored dtype changed, the reducers of every DDP in :attr:`model` are built anew, which all ranks must do together.

        Returns:
            Whether a stored dtype changed.

        Raises:
            SelectionError: Two rules claim a method or a parameter with different dtypes; under ``strict``, a pattern or
                a method that takes nothing.
            OverrideError: A selected module cannot be overridden, or its parameters cannot be stored in the dtype.
        """
        result = select(self.model, self.rule.selection)
        plan = list(self._plan(result))
        dead = self._dead(result, plan)
        if self.rule.strict and dead:
            raise SelectionError(dead[0].replace("Mend it or drop it.", "Mend it, or drop strict=True."))
        for selected, method in plan:
            self._check(selected, method)
        self._check_units(plan)
        storage = self._plan_storage(result, plan)
        self._let_go_of_all_but(plan)
        self._install(plan, result)
        changed = self._store(storage)
        self.total = result.total
        self.warnings = dead + cautions(self.rule, plan) + self._caution_of_ties(storage)
        link(self.model)
        return changed

    def remove(self) -> None:
        """Put back exactly what was there; other handles' overrides of the same methods stay.

        Parameters return to the dtype that they were stored in, with the values that they have now.
        """
        self._let_go((record.module, record.method) for record in self.records)
        self._let_go(self._kept_out)
        for hook in self._hooks.values():
            hook.remove()
        self._unstore()
        self.records, self._kept_out, self._hooks = [], [], {}
        link(self.model)

    def __repr__(self) -> str:
        stored = f", {len(self.stored)} tensors stored" if self.stored else ""
        return f"<{self.rule}: {len(self.records)} methods overridden{stored}>"

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
        check_device(selected.module, self.rule.dtype, where)
        check_shapes_known(selected.module, self.rule.dtype, where)
        present = find_override(selected.module, method)
        for claim in present.claims if present is not None else ():
            if claim.dtype is not None and claim.dtype is not self.rule.dtype and claim.owner != self._id:
                raise SelectionError(
                    f"{self.rule.name}: {claim.label!r} ({dtype_name(claim.dtype)}) and {selected.caught_by[0]!r} "
                    f"({dtype_name(self.rule.dtype)}) both claim '{selected.names[0]}.{method}'. Narrow one of them."
                )

    def _check_units(self, plan: list[tuple[Selected, str]]) -> None:
        ids = {id(selected.module) for selected, _ in plan}
        for selected, method in plan:
            unit = unit_out_of_reach(
                selected.module, lambda m: id(m) in ids or find_override(m, "forward") is not None
            )
            if unit is not None:
                raise OverrideError(
                    f"{self.rule.name}: {selected.names[0]}.{method}: got a module with the FSDP2 unit {unit!r} below it, "
                    "which puts its own parameters in place when it is called; expected the units to be named as well. "
                    f"Let the patterns match '{selected.names[0]}.{unit}' too, or shard {selected.names[0]!r} as one unit."
                )

    def _dead(self, result: SelectionResult, plan: list[tuple[Selected, str]]) -> list[str]:
        """What was asked for and takes nothing."""
        name = self.rule.name
        if self.rule.selection.is_empty:
            return [
                f"{name}: no patterns and no class_patterns: nothing is overridden. Name modules, such as ['norm']."
            ]
        messages = result.dead_messages(name)
        have = {method for _, method in plan}
        for method in self.rule.methods:
            if result.taken and method not in have and not self._stores_something_of(result):
                messages.append(
                    f"{name}.methods_to_override: none of the {len(result.taken)} selected modules has a method "
                    f"{method!r}. Mend it or drop it."
                )
        if not result.taken and not messages:
            messages.append(
                f"{name}: exclude takes away all that the patterns match: nothing is overridden. Narrow it."
            )
        return messages

    def _stores_something_of(self, result: SelectionResult) -> bool:
        """A ParameterList has no forward, and parameters to store."""
        rule = self.rule
        return any(
            True
            for selected in result.taken
            for _ in own_tensors(selected.module, rule.override_parameters, rule.override_buffers)
        )

    def _plan_storage(self, result: SelectionResult, plan: list[tuple[Selected, str]]) -> list[Stored]:
        rule = self.rule
        if not (rule.override_parameters or rule.override_buffers):
            return []
        sharded = sharded_by(self.model)
        if sharded is not None:
            raise OverrideError(
                f"{rule.name}.override_parameters: got a model sharded by {sharded}, which wants one dtype a unit; "
                "expected an unsharded one. Cast the modules before sharding, or drop override_parameters."
            )
        computing = {id(selected.module) for selected, _ in plan}
        for selected in result.taken:
            self._check_that_weights_are_cast_with_it(selected, computing)
        storage = plan_storage(
            self.model, result.taken, rule.dtype, rule.override_parameters, rule.override_buffers
        )
        check_storage(storage, self._id, str(rule.selection), rule.name)
        return storage

    def _caution_of_ties(self, storage: list[Stored]) -> list[str]:
        """A tied parameter has its new dtype in every module, and some may be no match."""
        overridden = {id(record.module) for record in self.records}
        owners = {id(m._parameters): m for _, m in named_bare_modules(self.model)}
        for stored in storage:
            for name, (held, _) in zip(stored.names, stored.places, strict=True):
                owner = owners.get(id(held))
                if owner is None or id(owner) in overridden or find_override(owner, "forward") is not None:
                    continue
                if has_method(owner, "forward") and len(stored.names) > 1:
                    return [
                        f"{self.rule.name}: {' = '.join(stored.names)!r} is stored in {dtype_name(stored.dtype)}, and "
                        f"{name!r} belongs to a module that computes with it as it is. Match that module as well."
                    ]
        return []

    def _check_that_weights_are_cast_with_it(self, selected: Selected, computing: set[int]) -> None:
        parent = never_called_by(self.model, selected.module)
        if parent is None or id(parent) in computing or find_override(parent, "forward") is not None:
            return
        raise OverrideError(
            f"{self.rule.name}.override_parameters: got {selected.names[0]!r}, whose weights its parent, a "
            f"{type(parent).__name__}, reads without calling it, so nothing would cast its input; expected a module that is "
            "called. Name the parent as well, or exclude it."
        )

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
            override = OverriddenMethod(module, method)
            put_in(override)
        if all(claim.owner != self._id for claim in override.claims):
            cast_all = self.rule.cast_inputs == "all" and dtype is not None
            override.claim((*override.claims, Claim(self._id, label, dtype, cast_all, self.warn)))
        return override

    def _keep_out(self, result: SelectionResult) -> None:
        """Excluded modules below an overridden one get a claim that keeps them out of it."""
        self._kept_out = []
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
        for layer in layers_with_fast_path(
            self.model, [*self.modules, *(module for module, _ in self._kept_out)]
        ):
            if id(layer) not in self._hooks:
                self._hooks[id(layer)] = block_fast_path(layer)

    def _store(self, storage: list[Stored]) -> bool:
        """Cast what is not in the dtype; returns whether there was anything."""
        for stored in self.stored:  # those that are planned again claim again
            release_storage(stored, self._id)
        originals = {id(old.tensor): old.original for old in self.stored}
        self.stored = [replace(new, original=originals.get(id(new.tensor), new.original)) for new in storage]
        moved = [stored for stored in self.stored if stored.tensor.dtype is not stored.dtype]
        for stored in self.stored:
            claim_storage(stored, self._id, str(self.rule.selection))
        for stored in moved:  # what had been stored before is put back, perhaps in the midst of accumulation
            change_dtype(stored.tensor, stored.dtype, keep_gradient=id(stored.tensor) in originals)
        self._after_change_of_dtype(moved)
        return bool(moved)

    def _unstore(self) -> None:
        free = [stored for stored in self.stored if release_storage(stored, self._id)]
        moved = [stored for stored in free if stored.tensor.dtype is not stored.original]
        for stored in moved:
            change_dtype(stored.tensor, stored.original)
        self._after_change_of_dtype(moved)
        self.stored = []

    def _after_change_of_dtype(self, moved: list[Stored]) -> None:
        if moved:
            flatten_rnns(stored.module for stored in moved)
            renew_reducers(self.model)

    def _let_go_of_all_but(self, plan: list[tuple[Selected, str]]) -> None:
        keep = {(id(selected.module), method) for selected, method in plan}
        self._let_go((r.module, r.method) for r in self.records if (id(r.module), r.method) not in keep)

    def _let_go(self, methods: Iterable[tuple[nn.Module, str]]) -> None:
        for module, method in methods:
            held = find_override(module, method)
            if held is None:
                continue  # somebody has deleted it
            held.claim(tuple(claim for claim in held.claims if claim.owner != self._id))
            if not held.claims:
                take_out(held)


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
    override_parameters: bool = False,
    override_buffers: bool = False,
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
    - A change that a method makes to one of its own parameters (``weight.clamp_()`` under ``no_grad``) is kept where the
      parameter is cast, but not in a compiled region, and not when it is made through ``.data``, which leaves no trace.

    Args:
        model: Any model, wrapped (DDP, ``torch.compile``, checkpoint wrappers) or not. Names are the bare model's.
        patterns: Regexes, ``re.search`` on the dotted module name. A bare string is one pattern. The root is never taken.
        class_patterns: Regexes, ``re.search`` on the class name. A module is taken when either kind matches.
        dtype: A name of :data:`~dtype_hooks.DTYPES` or a ``torch.dtype``.
        methods_to_override: Methods to wrap, ``["forward"]`` by default; those that a module lacks are passed over.
        exclude: Regexes on the dotted name; a module with a name in which one is found is not taken.
        cast_inputs: ``"first"``, or ``"all"`` for every floating tensor in args and kwargs, nested ones too.
        strict: Raise instead of warning when a pattern or a method takes nothing.
        override_parameters: Also store the own floating parameters of each matched module (not its children's) in
            ``dtype``. Each stays the same Parameter, tied ones stay tied, gradients in another dtype are dropped. Build the
            optimizer's state afterwards. Under DDP pass the wrapped model, on every rank: its reducers are built anew.
        override_buffers: The same for the own floating buffers.

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
        patterns,
        class_patterns,
        dtype,
        methods_to_override,
        exclude,
        cast_inputs,
        strict,
        override_parameters,
        override_buffers,
    )
    handle = rule.install(model)
    for message in handle.warnings:
        _warn(message)
    return handle


def cautions(rule: OverrideRule, plan: list[tuple[Selected, str]]) -> list[str]:
    """What is done as asked and is likely to hurt."""
    if rule.dtype not in (torch.float16, torch.bfloat16):
        return []
    norms = [s.names[0] for s, _ in plan if isinstance(s.module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return []
    return [
        f"{rule.name}: {len(norms)} BatchNorms ({norms[0]!r}, ...) update their running statistics in "
        f"{dtype_name(rule.dtype)}, which stall far from the true mean and variance. Exclude them."
    ]


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


def _warn(message: str) -> None:
    warnings.warn(f"dtype_hooks: {message}", stacklevel=3)
