# The GPT of gpt_pydoc.py with a dtype for each block: the first runs in the model's bfloat16, the second in float16, the
# third opts out and runs in float32. Norms and the head stay in float32 as there.
#
# autocast_dtype is the model-wide dtype; a block's own comes from its get_autocast_dtype() and disable_autocast, which the
# model sets from block_dtypes. The log has a table of all nodes. One block in float16 is enough for the loss to be scaled.
_base_ = ["gpt_pydoc.py"]

autocast_dtype = "bfloat16"

model = dict(block_dtypes=["model", "float16", "off"])

custom_hooks = [
    dict(type="AutocastHook", output_dtype="float32", verbose=True),
    dict(
        type="DtypeOverrider",
        patterns=[r"(^|\.)norm\d?$", r"^head$"],
        dtype="float32",
    ),
]
