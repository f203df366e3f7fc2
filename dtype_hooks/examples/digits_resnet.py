"""A small residual network for 8x8 images in mmengine's conventions."""

from __future__ import annotations

import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import Tensor, nn

from dtype_hooks.errors import ConfigError


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the input or to its 1x1 projection (ResNet's basic block).

    ``(batch, in_channels, h, w)`` to ``(batch, channels, ceil(h / stride), ceil(w / stride))``.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = (
            nn.Sequential()
            if stride == 1 and in_channels == channels
            else _projection(in_channels, channels, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve twice and add the short cut."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


def _projection(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(channels),
    )


@MODELS.register_module()
class DigitsResNet(BaseModel):
    """A stem, one basic block for each stage, global average pooling and a linear classifier.

    Parameters are float32. Under autocast the convolutions run in its dtype.

    Args:
        channels: Channels of each stage; every stage after the first halves height and width.
        num_classes: Number of classes.
        data_preprocessor: As in ``mmengine.model.BaseModel``, which moves the batch to the model's device.
        init_cfg: As in ``mmengine.model.BaseModule``.
    """

    def __init__(
        self,
        channels: tuple[int, ...] = (32, 64),
        num_classes: int = 10,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        self.stem = nn.Conv2d(1, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.stages = nn.Sequential()
        for i, width in enumerate(channels):
            self.stages.append(BasicBlock(channels[max(i - 1, 0)], width, stride=1 if i == 0 else 2))
        self.fc = nn.Linear(channels[-1], num_classes)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, mode: str = "tensor"
    ) -> Tensor | dict[str, Tensor] | list[dict[str, int]]:
        """Run the model as mmengine asks for.

        Args:
            inputs: Images, float32, shape ``(batch, 1, height, width)``.
            targets: Classes, int64, shape ``(batch,)``. Not needed for ``"tensor"``.
            mode: ``"tensor"``, ``"loss"`` or ``"predict"``.

        Returns:
            ``"tensor"``: logits, shape ``(batch, num_classes)``. ``"loss"``: ``loss``, the mean cross-entropy in nats.
            ``"predict"``: for each image ``predicted`` and ``target``.
        """
        logits = self._logits(inputs)
        if mode == "tensor":
            return logits
        if targets is None:
            raise ConfigError(
                f"DigitsResNet.forward: got targets=None; expected classes for mode={mode!r}; pass targets"
            )
        if mode == "loss":
            return {"loss": F.cross_entropy(logits.float(), targets)}
        if mode == "predict":
            pairs = zip(logits.argmax(dim=1).tolist(), targets.tolist(), strict=True)
            return [{"predicted": predicted, "target": target} for predicted, target in pairs]
        raise ConfigError(
            f"DigitsResNet.forward: got mode={mode!r}; expected tensor, loss or predict; pass one of them"
        )

    def _logits(self, inputs: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.stem(inputs)))
        x = self.stages(x)
        return self.fc(x.mean(dim=(2, 3)))
