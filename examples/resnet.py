"""Which shape is it? A small ResNet on pictures that it draws itself."""

import numpy as np
from pictures import shapes

import penstock as ps
from penstock import Device, Tensor, nn, optim
from penstock.nn import functional as F  # noqa: N812

BATCH = 32


class Block(nn.Module):
    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(channels, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet(width: int = 16, classes: int = 4) -> nn.Module:
    stem = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)]
    return nn.Sequential(*stem, Block(width, width, 1), Block(width, 2 * width, 2), *head)


def main(device: Device | str | None = None, steps: int = 100) -> float:
    ps.manual_seed(1)
    device = device or ps.default_device()
    random = np.random.default_rng(1)
    model = resnet().to(device)
    optimizer = optim.AdamW(model.parameters(), lr=2e-3)

    @ps.jit
    def step(images: Tensor, kinds: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), kinds)
        loss.backward()
        optimizer.step()
        return loss

    for number in range(1, steps + 1):
        loss = step(*(ps.tensor(array, device=device) for array in shapes(BATCH, random)))
        if number % 20 == 0:
            print(f"step {number}: loss {loss:.3f}")
    model.eval()
    images, kinds = shapes(200, random)  # which it has not seen
    right = (model(ps.tensor(images, device=device)).argmax(1).numpy() == kinds).mean()
    print(f"{right:.1%} of new pictures right")
    return loss.item()


if __name__ == "__main__":
    main()
