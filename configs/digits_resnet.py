# A small residual network learns scikit-learn's handwritten digits; needs `pip install 'dtype-hooks[examples]'`.
#
# Convolutions run in bfloat16 under AutocastHook; batch norms and the classifier are held in float32 by DtypeOverrider.
_base_ = ["_base_/default_runtime.py"]

custom_imports = dict(imports=["dtype_hooks", "dtype_hooks.examples"], allow_failed_imports=False)

max_iters = 400

model = dict(
    type="DigitsResNet",
    channels=(64, 128),
    num_classes=10,
    data_preprocessor=dict(type="BaseDataPreprocessor"),
)

custom_hooks = [
    dict(type="AutocastHook", dtype="bfloat16", output_dtype="float32"),
    dict(
        type="DtypeOverrider",
        patterns=[r"^fc$"],
        class_patterns=["^BatchNorm2d$"],
        dtype="float32",
        verbose=True,
    ),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    dataset=dict(type="DigitsImages", split="train"),
    # The runner hands its seed to the sampler, so the order of the data is the same again after a resume.
    sampler=dict(type="InfiniteSampler", shuffle=True),
    collate_fn=dict(type="default_collate"),
)
val_dataloader = dict(
    batch_size=180,
    num_workers=0,
    dataset=dict(type="DigitsImages", split="validation"),
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=dict(type="default_collate"),
)
test_dataloader = dict(
    batch_size=180,
    num_workers=0,
    dataset=dict(type="DigitsImages", split="test"),
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=dict(type="default_collate"),
)
val_evaluator = dict(type="TopOneAccuracy")
test_evaluator = dict(type="TopOneAccuracy")

train_cfg = dict(type="IterBasedTrainLoop", max_iters=max_iters, val_interval=100)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

optim_wrapper = dict(
    type="OptimWrapper",
    # Weight decay was chosen from 5e-4, 5e-3 and 2e-2 by five-fold cross-validation on the images outside the test split.
    optimizer=dict(type="SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=2e-2),
)
param_scheduler = dict(
    type="CosineAnnealingLR", by_epoch=False, begin=0, end=max_iters, T_max=max_iters, eta_min=0.0
)

randomness = dict(seed=0)
