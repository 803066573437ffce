"""A network that knows the digits 0 to 4 learns 5 to 9 from a hundred pictures, on top of what it knows."""

import tempfile
from pathlib import Path

from digits import Net, accuracy, train
from pictures import digits

import penstock as ps
from penstock import Device, nn


def main(device: Device | str | None = None, steps: int = 200) -> float:
    ps.manual_seed(1)
    device = device or ps.default_device()
    images, labels = digits()
    known, new = labels < 5, labels >= 5

    print("digits 0 to 4, from the beginning")
    model = Net(classes=5).to(device)
    train(model, images[known], labels[known], steps, device)

    with tempfile.TemporaryDirectory() as folder:
        ps.save(model.state_dict(), Path(folder) / "digits.safetensors")
        weights = ps.load(Path(folder) / "digits.safetensors")

    print("digits 5 to 9, on top of what it knows")
    model = Net(classes=5)
    model.load_state_dict(weights)
    model.conv1.requires_grad_(False)  # strokes are the same for all digits
    model.conv2.requires_grad_(False)
    model.head = nn.Linear(64, 5)
    model.to(device)
    few, many = slice(0, 100), slice(100, None)
    loss = train(model, images[new][few], labels[new][few] - 5, steps, device)
    print(f"{accuracy(model, images[new][many], labels[new][many] - 5, device):.1%} of the others right")
    return loss


if __name__ == "__main__":
    main()
