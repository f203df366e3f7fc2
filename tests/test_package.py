"""What ``import dtype_hooks`` gives, with mmengine and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dtype_hooks

ROOT = Path(__file__).parents[1]

NO_MMENGINE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "mmengine" or name.startswith("mmengine."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

NO_LIBGL = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "cv2":
            raise ImportError("libGL.so.1: cannot open shared object file: No such file or directory")

sys.meta_path.insert(0, Blocker())
"""

NO_MMENGINE_TORCH_ONLY = """
import torch
from torch import nn
import dtype_hooks

assert "dtype_hooks.hooks" not in sys.modules
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
seen = []
model[1].register_forward_pre_hook(lambda m, args: seen.append(torch.is_autocast_enabled("cpu")))
with dtype_hooks.override_dtype(model, patterns=["1"], dtype="float64"):
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.ones(2, 4))
assert y.dtype is torch.bfloat16
assert model[1].__dict__.get("forward") is None
with dtype_hooks.track_scales(model) as scales:
    model(torch.ones(2, 4)).sum().backward()
assert "1:layer_norm" in str(scales)
assert "mmengine" in sys.modules or not {"rich", "matplotlib"} & set(sys.modules)  # mmengine itself needs both

def message(ask):
    try:
        ask()
    except dtype_hooks.MissingDependencyError as error:
        assert isinstance(error, ImportError) and isinstance(error, dtype_hooks.DtypeHooksError)
        return str(error)
    raise SystemExit("nothing was raised")

def from_import():
    from dtype_hooks import DtypeOverrider

for name in NEEDS_MMENGINE:
    assert message(lambda: getattr(dtype_hooks, name)).startswith(f"dtype_hooks.{name}: got no usable mmengine (")
print(message(lambda: dtype_hooks.DtypeOverrider))
assert message(from_import) == message(lambda: dtype_hooks.DtypeOverrider)

scope = {}
exec("from dtype_hooks import *", scope)
assert "override_dtype" in scope
assert not set(NEEDS_MMENGINE) & (set(scope) | set(dtype_hooks.__all__))
"""


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


def test_all_is_sorted_unique_and_complete():
    names = dtype_hooks.__all__
    public = {
        name
        for name, value in vars(dtype_hooks).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("dtype_hooks.")
    }

    def constants_classes_then_the_rest(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert names == sorted(set(names), key=constants_classes_then_the_rest)
    assert public <= set(names)
    assert all(hasattr(dtype_hooks, name) for name in names)


def test_star_import_gives_exactly_all():
    scope: dict[str, object] = {}
    exec("from dtype_hooks import *", scope)

    assert set(scope) - {"__builtins__"} == set(dtype_hooks.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dtype_hooks' has no attribute 'DtypeOverider'"):
        dtype_hooks.DtypeOverider


@pytest.mark.parametrize(
    ("blocker", "cause"), [(NO_MMENGINE, "No module named 'mmengine"), (NO_LIBGL, "libGL.so.1: cannot open")]
)
def test_where_mmengine_cannot_be_imported_the_core_works_and_a_hook_says_what_to_install(
    tmp_path, blocker, cause
):
    of_hooks = [
        name
        for name in dtype_hooks.__all__
        if getattr(getattr(dtype_hooks, name), "__module__", "").startswith("dtype_hooks.hooks.")
    ]
    assert "DtypeOverrider" in of_hooks

    done = run_python(f"NEEDS_MMENGINE = {of_hooks}\n{blocker}{NO_MMENGINE_TORCH_ONLY}", tmp_path)

    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert message.startswith("dtype_hooks.DtypeOverrider: got no usable mmengine (")
    assert cause in message
    assert "expected mmengine >= 0.10.7" in message
    assert "pip install 'mmengine>=0.10.7'" in message
    assert "libgl1" in message


def test_a_wheel_has_every_module_and_the_marker_of_typing(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1", reason="older ones need the wheel package")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    readme = ROOT / "README.md"
    (source / "README.md").write_text(readme.read_text() if readme.exists() else "")
    shutil.copytree(
        ROOT / "dtype_hooks", source / "dtype_hooks", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"

    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True, timeout=120
    )

    (wheel,) = tmp_path.glob("dtype_hooks-*.whl")
    assert dtype_hooks.__version__ in wheel.name
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("dtype_hooks/")}
    there = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "dtype_hooks").rglob("*")
        if p.suffix == ".py" or p.name == "py.typed"
    }
    assert inside == there
