"""Every example in a docstring and every Python block of the README runs."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from mmengine.config import Config

import dtype_hooks

ROOT = Path(__file__).parents[1]
MODULES = [info.name for info in pkgutil.walk_packages(dtype_hooks.__path__, "dtype_hooks.")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_docstring_examples_run():
    results = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert sum(result.attempted for result in results.values()) >= 8
    assert {name: result for name, result in results.items() if result.failed} == {}


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0][:40] for block in BLOCKS])
def test_readme_block_runs(block, tmp_path, monkeypatch):
    """Blocks with ``custom_hooks`` are configs and must parse as one; the others are programs."""
    if re.search(r"^(custom_hooks|hooks) = ", block, flags=re.MULTILINE):
        path = tmp_path / "config.py"
        path.write_text(block, encoding="utf-8")
        cfg = dtype_hooks.prepare_config(Config.fromfile(path))
        assert all(
            dtype_hooks.hooks.DtypeOverrider for hook in cfg.custom_hooks if hook["type"] == "DtypeOverrider"
        )
    else:
        monkeypatch.chdir(tmp_path)  # some write files
        exec(compile(block, "README.md", "exec"), {})


def test_readme_has_blocks_and_one_test_command():
    assert len(BLOCKS) >= 3
    assert README.count("<!-- tests -->") == 1
