# The GPT of gpt_pydoc.py in float16 with dynamic loss scaling, on any device: the same hooks, another dtype.
#
# The log's grad_scale is the loss scale, skipped_steps counts the optimizer steps that were left out because a gradient was not
# finite. 65536 is torch's default to begin with; it is halved at each skip and doubled after growth_interval iterations without.
_base_ = ["gpt_pydoc.py"]

custom_hooks = [
    dict(type="AutocastHook", dtype="float16", loss_scale=dict(growth_interval=200), output_dtype="float32"),
    dict(
        type="DtypeOverrider",
        patterns=[r"(^|\.)norm\d?$", r"^head$"],
        dtype="float32",
    ),
]
