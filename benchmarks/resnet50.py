"""ResNet-50 in names that Penstock and PyTorch share; `zoo.py` builds it with both."""

from __future__ import annotations

from penstock import Tensor, nn
from penstock.nn import functional as F  # noqa: N812


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if channels != outputs:
            conv = nn.Conv2d(channels, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 << stage
            layers.append(Bottleneck(channels, width, 2 if stage and block == 0 else 1))
            channels = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)
