"""Which digit is it? A small convolutional network on scikit-learn's digits; without it, on drawn ones."""

import numpy as np
from pictures import digits

import penstock as ps
from penstock import Device, Tensor, nn, optim
from penstock.nn import functional as F  # noqa: N812


class Net(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(8 * width, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(F.relu(self.fc(x.flatten(1))))


def train(model: nn.Module, x: np.ndarray, y: np.ndarray, steps: int, device: Device | str) -> float:
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)

    @ps.jit
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    batches = ps.data.ArrayBatches(x, y, batch=50, seed=1)
    for number in range(1, steps + 1):
        loss = step(*(ps.tensor(array, device=device) for array in next(batches)))
        if number % 50 == 0:
            print(f"step {number}: loss {loss:.3f}")
    return loss.item()


def accuracy(model: nn.Module, x: np.ndarray, y: np.ndarray, device: Device | str) -> float:
    with ps.no_grad():
        return float((model(ps.tensor(x, device=device)).argmax(1).numpy() == y).mean())


def main(device: Device | str | None = None, steps: int = 200) -> float:
    ps.manual_seed(1)
    device = device or ps.default_device()
    images, labels = digits()
    model = Net().to(device)
    loss = train(model, images[300:], labels[300:], steps, device)
    print(f"{accuracy(model, images[:300], labels[:300], device):.1%} of new digits right")
    return loss


if __name__ == "__main__":
    main()
