# gpt_pydoc.py in mmengine's Python style: types are the classes themselves, so an editor can follow them, and
# the imports register what `custom_imports` does elsewhere. The training is the same, number for number.
from mmengine.config import read_base
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.model import BaseDataPreprocessor
from mmengine.optim import CosineAnnealingLR, LinearLR, OptimWrapper
from mmengine.runner import IterBasedTrainLoop, ValLoop
from torch.optim import AdamW
from torch.utils.data import default_collate

from dtype_hooks import AutocastHook, DtypeOverrider
from dtype_hooks.examples import BitsPerCharacter, CharGPT, PydocCharacters

with read_base():
    from ._base_.default_runtime import *  # noqa: F403

context = 64
max_iters = 800
warmup_iters = 40

model = dict(
    type=CharGPT,
    vocab_size=97,
    context=context,
    dim=192,
    num_layers=3,
    num_heads=3,
    data_preprocessor=dict(type=BaseDataPreprocessor),
)

custom_hooks = [
    dict(type=AutocastHook, dtype="bfloat16", output_dtype="float32"),
    dict(
        type=DtypeOverrider,
        patterns=[r"(^|\.)norm\d?$", r"^head$"],
        dtype="float32",
        verbose=True,
    ),
]

train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    dataset=dict(type=PydocCharacters, split="train", context=context, stride=1),
    sampler=dict(type=InfiniteSampler, shuffle=True),
    collate_fn=dict(type=default_collate),
)
val_dataloader = dict(
    batch_size=128,
    num_workers=0,
    dataset=dict(type=PydocCharacters, split="validation", context=context),
    sampler=dict(type=DefaultSampler, shuffle=False),
    collate_fn=dict(type=default_collate),
)
val_evaluator = dict(type=BitsPerCharacter)

train_cfg = dict(type=IterBasedTrainLoop, max_iters=max_iters, val_interval=200)
val_cfg = dict(type=ValLoop)

optim_wrapper = dict(
    type=OptimWrapper,
    optimizer=dict(type=AdamW, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type=LinearLR, start_factor=0.05, by_epoch=False, begin=0, end=warmup_iters),
    dict(
        type=CosineAnnealingLR,
        by_epoch=False,
        begin=warmup_iters,
        end=max_iters,
        T_max=max_iters - warmup_iters,
        eta_min_ratio=0.05,
    ),
]

randomness = dict(seed=0)
