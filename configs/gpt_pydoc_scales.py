# The GPT of gpt_pydoc.py in float16 with dynamic loss scaling, and the scale of every tensor on record.
#
# Every 100th iteration is recorded into scales.jsonl of the run's log_dir; pictures lie in scales/ beside it when training ends.
# Look at them again with tools/scales.py. Should a step make a NaN, the log names the function that made it.
_base_ = ["gpt_pydoc_fp16.py"]

custom_hooks = [
    dict(type="AutocastHook", dtype="float16", loss_scale=dict(growth_interval=200), output_dtype="float32"),
    dict(
        type="DtypeOverrider",
        patterns=[r"(^|\.)norm\d?$", r"^head$"],
        dtype="float32",
    ),
    dict(type="ScaleTracker", interval=100, formats=["float16", "float8_e4m3fn"], watch_nonfinite=True),
]
