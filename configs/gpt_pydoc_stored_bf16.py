# The GPT of gpt_pydoc.py with the matrices of its blocks stored in bfloat16: half the memory for them, their gradients and
# their optimizer states. Norms, embeddings and the head stay stored in float32.
#
# Also on two processes: torchrun --nproc_per_node=2 tools/train.py configs/gpt_pydoc_stored_bf16.py
_base_ = ["gpt_pydoc.py"]

custom_hooks = [
    dict(type="AutocastHook", dtype="bfloat16", output_dtype="float32"),
    dict(
        type="DtypeOverrider",
        patterns=[r"(^|\.)norm\d?$", r"^head$"],
        dtype="float32",
        verbose=True,
    ),
    dict(
        type="DtypeOverrider",
        patterns=[r"^blocks\..*\.(qkv|proj|up)$"],
        dtype="bfloat16",
        override_parameters=True,
        verbose=True,
    ),
]
