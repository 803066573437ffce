"""Digits out of noise: a small U-Net learns to tell what is noise, and takes it away step by step."""

from pictures import digits

import penstock as ps
from penstock import Device, Tensor, nn, optim
from penstock.nn import functional as F  # noqa: N812

TIMES = 40  # from a picture to noise


def conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width: int = 32, channels: int = 1) -> None:
        super().__init__()
        self.times, self.fine = nn.Embedding(TIMES + 1, width), conv(channels, width)
        self.low = nn.Sequential(nn.AvgPool2d(2), conv(width, 2 * width), nn.Upsample(scale_factor=2))
        self.out = nn.Sequential(conv(3 * width, width), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        x = self.fine(x) + self.times(times)[:, :, None, None]
        return self.out(ps.cat([x, self.low(x)], dim=1))


def main(device: Device | str | None = None, steps: int = 1000) -> float:
    ps.manual_seed(1)
    device = device or ps.default_device()
    model = UNet().to(device)
    optimizer = optim.AdamW(model.parameters(), lr=2e-3)
    share = ps.cumprod(1 - ps.linspace(0, 0.25, TIMES + 1, device=device), 0)  # of the picture, at each time

    @ps.jit
    def step(images: Tensor) -> Tensor:
        times, noise = ps.randint(1, TIMES + 1, (len(images), 1, 1, 1), device=device), ps.randn_like(images)
        mixed = share[times].sqrt() * images + (1 - share[times]).sqrt() * noise
        loss = F.mse_loss(model(mixed, times.flatten()), noise)
        loss.backward()
        optimizer.step()
        return loss

    batches = ps.data.ArrayBatches(2 * digits()[0] - 1, batch=64, seed=1)
    for number in range(1, steps + 1):
        loss = step(ps.tensor(next(batches)[0], device=device))
        if number % 200 == 0:
            print(f"step {number}: loss {loss:.3f}")
    x, levels, predict = ps.randn(6, 1, 8, 8, device=device), share.tolist(), ps.jit(model)
    for time in range(TIMES, 0, -1):
        now, before, noise = levels[time], levels[time - 1], predict(x, ps.full((6,), time, device=device))
        x = (before / now) ** 0.5 * (x - (1 - now) ** 0.5 * noise) + (1 - before) ** 0.5 * noise
    for row in (2 * x[:, 0] + 2).clamp(0, 3).long().transpose(0, 1).flatten(1).tolist():
        print("".join(" .o#"[ink] * 2 for ink in row))
    return loss.item()


if __name__ == "__main__":
    main()
