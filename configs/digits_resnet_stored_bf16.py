# The network of digits_resnet.py with its convolutions stored in bfloat16; batch norms and the classifier, with their
# parameters and running statistics, stay in float32.
#
# Also on two processes: torchrun --nproc_per_node=2 tools/train.py configs/digits_resnet_stored_bf16.py
_base_ = ["digits_resnet.py"]

custom_hooks = [
    dict(type="AutocastHook", dtype="bfloat16", output_dtype="float32"),
    dict(
        type="DtypeOverrider",
        patterns=[r"^fc$"],
        class_patterns=["^BatchNorm2d$"],
        dtype="float32",
        verbose=True,
    ),
    dict(
        type="DtypeOverrider",
        class_patterns=["^Conv2d$"],
        dtype="bfloat16",
        override_parameters=True,
        verbose=True,
    ),
]
