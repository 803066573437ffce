"""Which digit is it? A vision transformer that looks at patches of two by two pixels."""

from pictures import digits

import penstock as ps
from penstock import Device, Tensor, nn, optim
from penstock.nn import functional as F  # noqa: N812


class ViT(nn.Module):
    def __init__(
        self, size: int = 8, patch: int = 2, width: int = 32, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.token = nn.Parameter(ps.zeros(1, 1, width))  # which gathers what the head reads
        self.positions = nn.Parameter(0.02 * ps.randn(1, 1 + (size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = ps.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def main(device: Device | str | None = None, steps: int = 300) -> float:
    ps.manual_seed(1)
    device = device or ps.default_device()
    images, labels = digits()
    model = ViT().to(device)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)

    @ps.jit
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    batches = ps.data.ArrayBatches(images[300:], labels[300:], batch=50, seed=1)
    for number in range(1, steps + 1):
        loss = step(*(ps.tensor(array, device=device) for array in next(batches)))
        if number % 50 == 0:
            print(f"step {number}: loss {loss:.3f}")
    with ps.no_grad():
        guesses = model(ps.tensor(images[:300], device=device)).argmax(1).numpy()
    print(f"{(guesses == labels[:300]).mean():.1%} of new digits right")
    return loss.item()


if __name__ == "__main__":
    main()
