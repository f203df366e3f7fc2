# What the example configs share; nothing in here alters a training value.
default_scope = "mmengine"

default_hooks = dict(
    logger=dict(type="LoggerHook", interval=20, log_metric_by_epoch=False),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=200, max_keep_ckpts=2),
)

# by_epoch=False: every example is a fixed number of iterations. Names that match mean_pattern are logged as means over
# window_size iterations; the rest as their last value.
log_processor = dict(by_epoch=False, window_size=20, mean_pattern=r".*(loss|bpc|time|data_time|grad_norm).*")
log_level = "INFO"

vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(type="Visualizer", vis_backends=vis_backends)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),
)

load_from = None
resume = False
