"""DtypeOverrider is found by its type string, from every scope, and never replaces somebody else's hook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, DefaultScope, Registry

import dtype_hooks
from dtype_hooks import ConfigError, DtypeOverrider
from dtype_hooks.hooks.registry import register_hook


@pytest.fixture
def child_hooks():
    """What mmdet and its kin make: a registry of their own below mmengine's."""
    child = Registry("hook", parent=HOOKS, scope="mmdetlike", locations=[])
    yield child
    HOOKS.children.pop("mmdetlike")


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run ``code`` in a fresh process that imports the package from where this one has it."""
    env = {**os.environ, "PYTHONPATH": str(Path(dtype_hooks.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=env,
        check=False,
    )


def test_importing_the_package_registers_the_hook_under_its_name():
    assert HOOKS.get("DtypeOverrider") is DtypeOverrider
    assert dtype_hooks.DtypeOverrider is DtypeOverrider


def test_a_config_resolves_the_hook_by_type_string():
    hook = HOOKS.build({"type": "DtypeOverrider", "patterns": ["norm"]})

    assert type(hook) is DtypeOverrider
    assert hook.rule.selection.patterns == ("norm",)


def test_a_config_resolves_the_hook_by_class():
    """As Python-style configs name it: type=DtypeOverrider, and when dumped, its dotted path."""
    assert type(HOOKS.build({"type": DtypeOverrider, "patterns": ["norm"]})) is DtypeOverrider
    assert type(HOOKS.build({"type": "dtype_hooks.DtypeOverrider", "patterns": ["norm"]})) is DtypeOverrider


def test_a_child_registry_finds_the_hook_in_its_parent(child_hooks):
    assert child_hooks.get("DtypeOverrider") is DtypeOverrider
    assert type(child_hooks.build({"type": "DtypeOverrider"})) is DtypeOverrider


def test_a_run_in_a_child_scope_finds_the_hook(child_hooks):
    with DefaultScope.overwrite_default_scope("mmdetlike"):
        with HOOKS.switch_scope_and_registry(None) as registry:
            assert registry is child_hooks
        assert type(HOOKS.build({"type": "DtypeOverrider"})) is DtypeOverrider
        assert type(HOOKS.build({"type": "mmengine.DtypeOverrider"})) is DtypeOverrider


def test_a_child_scope_may_have_a_hook_of_the_same_name(child_hooks):
    class Theirs(Hook):
        pass

    child_hooks.register_module(name="DtypeOverrider", module=Theirs)

    with DefaultScope.overwrite_default_scope("mmdetlike"):
        assert type(HOOKS.build({"type": "DtypeOverrider"})) is Theirs
        assert type(HOOKS.build({"type": "mmengine.DtypeOverrider"})) is DtypeOverrider


def test_a_taken_name_is_an_error_that_names_the_module():
    theirs = type("DtypeOverrider", (Hook,), {"__module__": "their_hooks.precision"})

    with pytest.raises(
        ConfigError, match=r"got 'DtypeOverrider', a name that dtype_hooks\.hooks\.dtype_overrider"
    ):
        register_hook(theirs)

    assert HOOKS.get("DtypeOverrider") is DtypeOverrider


IMPORT_AFTER_ANOTHER = """
import sys, types
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

theirs = type("DtypeOverrider", (Hook,), {"__module__": "their_hooks.precision"})
HOOKS.register_module(module=theirs)
try:
    import dtype_hooks
except ValueError as error:
    print(type(error).__name__, error)
assert HOOKS.get("DtypeOverrider") is theirs
"""

RELOAD = """
import importlib
import dtype_hooks
from mmengine.registry import HOOKS
import dtype_hooks.hooks.dtype_overrider as module

old = module.DtypeOverrider
importlib.reload(module)
assert module.DtypeOverrider is not old
assert HOOKS.get("DtypeOverrider") is module.DtypeOverrider
importlib.reload(dtype_hooks.hooks)
importlib.reload(dtype_hooks)
assert dtype_hooks.DtypeOverrider is module.DtypeOverrider
assert type(HOOKS.build(dict(type="DtypeOverrider"))) is module.DtypeOverrider
"""


def test_importing_the_package_after_another_that_took_the_name_says_which_module(tmp_path):
    done = run_python(IMPORT_AFTER_ANOTHER, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "ConfigError mmengine's HOOKS: got 'DtypeOverrider', a name that their_hooks.precision has registered"
    )


def test_the_package_can_be_reloaded(tmp_path):
    done = run_python(RELOAD, tmp_path)

    assert done.returncode == 0, done.stderr
