"""What prepare_config and merge_options make of configs of all styles."""

import copy
import json
import types
import warnings

import pytest
from mmengine.config import Config, ConfigDict
from mmengine.config.lazy import LazyObject
from mmengine.hooks import EMAHook, Hook, ParamSchedulerHook
from mmengine.registry import HOOKS

from dtype_hooks.errors import ConfigError
from dtype_hooks.hooks.config import merge_options, prepare_config

LAZY = """
from mmengine.hooks import EMAHook, ParamSchedulerHook

custom_hooks = [dict(type=ParamSchedulerHook)]
hooks = [dict(type=EMAHook, momentum=0.5)]
"""
TEXT = """
custom_hooks = [dict(type='ParamSchedulerHook')]
hooks = [dict(type='EMAHook', momentum=0.5)]
"""


@pytest.fixture(autouse=True)
def no_warning_unless_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def write(tmp_path):
    def write_config(text, name="cfg.py"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_config


def built(cfg):
    """The hooks that Runner would make of ``custom_hooks``."""
    return [
        HOOKS.build(copy.deepcopy(entry)) if isinstance(entry, dict) else entry
        for entry in cfg["custom_hooks"]
    ]


def names(cfg):
    return [type(hook).__name__ for hook in built(cfg)]


def as_config(text, write):
    return Config.fromfile(write(text))


def as_config_dict(text, write):
    return as_config(text, write)._cfg_dict


def as_plain_dict(text, write):
    return as_config(text, write).to_dict()


@pytest.mark.parametrize("text", [TEXT, LAZY], ids=["text", "python"])
@pytest.mark.parametrize("form", [as_config, as_config_dict, as_plain_dict])
def test_hooks_follow_custom_hooks_once_however_often_prepared(text, form, write):
    cfg = form(text, write)
    assert prepare_config(cfg) is cfg
    once = copy.deepcopy(cfg)
    assert prepare_config(prepare_config(cfg)) is cfg
    assert cfg == once if isinstance(cfg, dict) else cfg.to_dict() == once.to_dict()
    assert "hooks" not in list(cfg)
    assert names(cfg) == ["ParamSchedulerHook", "EMAHook"]


@pytest.mark.parametrize("text", [TEXT, LAZY], ids=["text", "python"])
def test_dumped_config_gives_the_same_hooks_once(text, write, tmp_path):
    cfg = prepare_config(as_config(text, write))
    cfg.dump(str(tmp_path / "dumped.py"))
    again = prepare_config(Config.fromfile(tmp_path / "dumped.py"))
    assert names(again) == ["ParamSchedulerHook", "EMAHook"]
    assert again.custom_hooks[1]["momentum"] == 0.5


def test_json_config(write):
    cfg = Config.fromfile(write(json.dumps({"hooks": [{"type": "EMAHook"}]}), "cfg.json"))
    assert names(prepare_config(cfg)) == ["EMAHook"]


def test_type_as_a_class_becomes_a_name_that_can_be_dumped(tmp_path):
    cfg = prepare_config(Config({"hooks": [{"type": EMAHook}]}))
    cfg.dump(str(tmp_path / "dumped.py"))
    assert names(Config.fromfile(tmp_path / "dumped.py")) == ["EMAHook"]


def test_class_without_a_name_stays_a_class():
    class Local(Hook):
        pass

    assert prepare_config({"hooks": [{"type": Local}]}) == {"custom_hooks": [{"type": Local}]}


def test_hook_objects_are_kept():
    hook = ParamSchedulerHook()
    assert prepare_config({"hooks": (hook,)})["custom_hooks"] == [hook]


def test_custom_hooks_set_to_hooks_gives_each_once(write):
    cfg = as_config("hooks = [dict(type='EMAHook')]\ncustom_hooks = hooks\n", write)
    assert names(prepare_config(cfg)) == ["EMAHook"]


def test_childs_hooks_replace_its_parents(write):
    write("hooks = [dict(type='EMAHook')]\n", "parent.py")
    child = as_config("_base_ = ['parent.py']\nhooks = [dict(type='ParamSchedulerHook')]\n", write)
    assert names(prepare_config(child)) == ["ParamSchedulerHook"]


@pytest.mark.parametrize("value", ["None", "[]"])
def test_child_turns_its_parents_hooks_off(value, write):
    write("hooks = [dict(type='EMAHook')]\ncustom_hooks = [dict(type='ParamSchedulerHook')]\n", "parent.py")
    child = as_config(f"_base_ = ['parent.py']\nhooks = {value}\n", write)
    assert names(prepare_config(child)) == ["ParamSchedulerHook"]
    assert "hooks" not in list(child)


def test_python_style_child_inherits_hooks(write):
    write(LAZY, "parent.py")
    child = "from mmengine.config import read_base\n\nwith read_base():\n    from .parent import *\n\nhooks[0].update(momentum=0.25)\n"
    cfg = prepare_config(as_config(child, write))
    assert names(cfg) == ["ParamSchedulerHook", "EMAHook"]
    assert cfg.custom_hooks[1]["momentum"] == 0.25


@pytest.mark.parametrize(
    "line",
    ["from mmengine import hooks", "import mmengine.hooks as hooks", "from nowhere_at_all import hooks"],
)
def test_imported_name_is_not_taken_for_hooks(line, write):
    cfg = as_config(
        f"{line}\nfrom mmengine.hooks import EMAHook\ncustom_hooks = [dict(type=EMAHook)]\n", write
    )
    assert names(prepare_config(cfg)) == ["EMAHook"]
    assert isinstance(dict.get(cfg._cfg_dict, "hooks"), LazyObject)


@pytest.mark.parametrize("value", [types, EMAHook, len])
def test_code_named_hooks_is_left_alone(value):
    assert prepare_config({"hooks": value}) == {"hooks": value}


def test_imported_list_is_taken_for_hooks(write, tmp_path, monkeypatch):
    (tmp_path / "my_shared_hooks.py").write_text("hooks = [dict(type='EMAHook')]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert names(prepare_config(as_config("from my_shared_hooks import hooks\n", write))) == ["EMAHook"]


@pytest.mark.parametrize("value", [{"type": "EMAHook"}, ConfigDict(type="EMAHook"), "EMAHook", 3, True])
def test_hooks_that_are_no_list_are_refused(value):
    with pytest.raises(ConfigError, match=r"^hooks: got .*; expected a list of hooks; write hooks = \[dict"):
        prepare_config({"hooks": value})


@pytest.mark.parametrize(
    "entry", ["EMAHook", None, {}, {"momentum": 1}, {"type": 3}, {"type": ""}, EMAHook, [{"type": "EMAHook"}]]
)
def test_entry_that_is_no_hook_is_refused_by_its_place(entry):
    with pytest.raises(
        ConfigError, match=r"^hooks\[1\]: got .*; expected a dict with a 'type' or a Hook; write"
    ):
        prepare_config({"hooks": [{"type": "EMAHook"}, entry]})


def test_refused_config_is_unchanged():
    cfg = {"hooks": [{"type": "EMAHook"}, 3], "custom_hooks": []}
    before = copy.deepcopy(cfg)
    with pytest.raises(ConfigError):
        prepare_config(cfg)
    assert cfg == before


def test_custom_hooks_that_are_no_list_are_refused():
    with pytest.raises(ConfigError, match=r"^custom_hooks: got .*expected a list of hooks"):
        prepare_config({"hooks": [{"type": "EMAHook"}], "custom_hooks": {"ema": {"type": "EMAHook"}}})


@pytest.mark.parametrize("value", [None, "config.py", [{"type": "EMAHook"}]])
def test_what_is_no_config_is_refused(value):
    with pytest.raises(
        ConfigError,
        match=r"prepare_config: got .*; expected an mmengine Config or a dict; use Config\.fromfile",
    ):
        prepare_config(value)


def test_config_without_hooks_is_unchanged(write):
    cfg = as_config("model = dict(type='X')\n", write)
    before = cfg.to_dict()
    assert prepare_config(cfg).to_dict() == before


@pytest.mark.parametrize(
    ("key", "value", "replacement"),
    [
        ("fp16", {"loss_scale": "dynamic"}, "custom_hooks = [dict(type='AutocastHook', dtype='float16')]"),
        ("fp16", True, "AutocastHook"),
        ("optimizer", {"type": "SGD"}, "optim_wrapper = dict(optimizer="),
        ("optimizer_config", {"grad_clip": None}, "optim_wrapper = dict(clip_grad="),
        ("lr_config", {"policy": "step"}, "param_scheduler = "),
        ("runner", {"type": "EpochBasedRunner"}, "train_cfg = dict(by_epoch="),
        ("total_epochs", 12, "train_cfg = dict(by_epoch=True"),
        ("evaluation", {"interval": 1}, "val_evaluator"),
        ("checkpoint_config", {"interval": 1}, "default_hooks = dict(checkpoint="),
        ("log_config", {"interval": 1}, "default_hooks = dict(logger="),
        ("workflow", [("train", 1)], "train_cfg = dict(val_interval="),
    ],
)
def test_old_key_gives_one_warning_with_its_replacement(key, value, replacement):
    cfg = {key: value}
    with pytest.warns(UserWarning, match="does not read; use") as caught:
        prepare_config(cfg)
    assert len(caught) == 1
    assert repr(key) in str(caught[0].message)
    assert replacement in str(caught[0].message)
    assert caught[0].filename == __file__
    assert cfg == {key: value}


def test_variables_of_a_config_file_give_no_warning():
    optimizer = {"type": "SGD"}
    prepare_config(
        {
            "optimizer": optimizer,
            "optim_wrapper": {"optimizer": optimizer},
            "total_epochs": 3,
            "train_cfg": {"max_epochs": 3},
            "checkpoint_config": {"type": "CheckpointHook"},
            "log_config": {"type": "LoggerHook"},
            "default_hooks": {"checkpoint": {"type": "CheckpointHook"}, "logger": {"type": "LoggerHook"}},
            "fp16": False,
            "runner": None,
        }
    )


TRAINING = {
    "model": {"type": "M", "backbone": {"type": "B", "depth": 3}},
    "train_cfg": {"by_epoch": False, "max_iters": 3},
    "hooks": [{"type": "EMAHook"}],
    "seed": 3,
}


def merged(key, value=5):
    cfg = Config(copy.deepcopy(TRAINING))
    merge_options(cfg, {key: value})
    return cfg


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("train_cfg.max_iters", lambda cfg: cfg.train_cfg.max_iters),
        ("train_cfg.val_interval", lambda cfg: cfg.train_cfg.val_interval),
        (
            "model.backbone.depths",
            lambda cfg: cfg.model.backbone.depths,
        ),  # the class is asked when it is built
        ("hooks.0.momentum", lambda cfg: cfg.hooks[0].momentum),
        ("default_hooks.checkpoint.interval", lambda cfg: cfg.default_hooks.checkpoint.interval),
        ("val_cfg.fp16", lambda cfg: cfg.val_cfg.fp16),
        (
            "model_wrapper_cfg.find_unused_parameters",
            lambda cfg: cfg.model_wrapper_cfg.find_unused_parameters,
        ),
        ("load_from", lambda cfg: cfg.load_from),
    ],
)
def test_option_is_merged(key, found):
    assert found(merged(key)) == 5


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("train_cfg.max_iter", "expected 'train_cfg.max_iters'"),
        ("train_cfgs.max_iters", "expected 'train_cfg'"),
        ("modle.backbone.depth", "expected 'model'"),
        ("optim_wraper.optimizer.lr", "expected 'optim_wrapper'"),
        ("hooks.1.momentum", "'hooks' is a list of 1"),
        ("hooks.type", "'hooks' is a list of 1"),
        ("seed.value", "'seed' is 3, which has no keys"),
        ("custom_hooks.0.momentum", "the config has no 'custom_hooks'; expected the index of a list"),
    ],
)
def test_misspelt_option_is_refused(key, message):
    with pytest.raises(ConfigError, match=f"^--cfg-options: got '{key}'; .*{message}.*; mend the key$"):
        merged(key)


def test_option_that_nothing_reads_gives_a_warning():
    with pytest.warns(UserWarning, match="neither the config nor mmengine reads 'colour'"):
        assert merged("colour").colour == 5
