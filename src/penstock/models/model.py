"""What every family of language models has: the protocol that training, generation and files know."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from penstock.errors import CheckpointError
from penstock.models.attending import Attention, CacheShape, whole
from penstock.models.generation import Decoders, Prompt, completed, streamed
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.layers import Linear
from penstock.nn.module import Module
from penstock.nn.quantizing import QuantizedLinear
from penstock.tensor import random
from penstock.tensor.core import Tensor, realize_together
from penstock.tensor.creation import zeros
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import reshape

if TYPE_CHECKING:
    from penstock.data import Tokenizer
    from penstock.models.sequences import Completion, Piece
    from penstock.models.tokenizing import TextTokenizer
    from penstock.nn.layers import Where


class LanguageModel(Module):
    """From token ids to the logits of the next token at each position.

    A family defines `embed`, `blocks`, `norm`, `head_weight`, `cache_shapes` and `weight_name`.
    """

    vocab_size: int
    context: int  # the most positions of a sequence
    blocks: list[Any]  # modules; each is called with its input, (batch, length, width), and an `Attention`
    norm: Module  # after the last block
    lm_head: Linear | QuantizedLinear | None = None  # None: the head has the weights of the embedding
    config: Mapping[str, Any] = {}  # the `config.json` that it was built from
    generation_config: Mapping[str, Any] = {}
    tokenizer: TextTokenizer | Tokenizer | None = None
    source: Path | None = None  # the folder or file that it was loaded from
    _decoders: Decoders | None = None  # of earlier generations

    # What a family defines

    @property
    @abstractmethod
    def cache_shapes(self) -> list[CacheShape]:
        """What each layer keeps of a position for those after it."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The weight of the last product, (vocab_size, width)."""

    @abstractmethod
    def embed(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """The input of the first block."""

    @abstractmethod
    def weight_name(self, name: str) -> tuple[str, bool]:
        """The name of a weight in Hugging Face's files, and whether it is transposed there."""

    @abstractmethod
    def initial_std(self, name: str) -> float | None:
        """The standard deviation of a weight before training; None: it starts as it was made."""

    def file_config(self) -> dict[str, Any]:
        """The `config.json` of the model."""
        return dict(self.config)

    def file_weights(self) -> list[tuple[str, Tensor, bool]]:
        """The tensors of the model's files: name, values, and whether they are transposed there."""
        weights = []
        for name, tensor in self.file_tensors():
            theirs, transposed = self.weight_name(name)
            weights.append((theirs, tensor, transposed))
        return weights

    def file_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its parameters, and the tensors of quantized layers, with their paths."""
        layers = [module for module in self.modules() if isinstance(module, QuantizedLinear)]
        known = {id(tensor) for layer in layers for tensor in (layer.packed, layer.scales)}
        known |= {id(tensor) for tensor in self.parameters()}
        return ((name, tensor) for name, tensor in self.named_tensors() if id(tensor) in known)

    # What all have in common

    def run(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """The output of the last norm, (batch, length, width), with attention of any kind.

        Of positions in pages, it has the last of each row alone: see `PagedAttention`.
        """
        x = self.embed(token_ids, attention)
        for block in self.blocks:
            x = block(x, attention)
        normed: Tensor = self.norm(x)
        return normed

    def features(self, token_ids: Tensor) -> Tensor:
        """The output of the last norm, of shape (batch, length, width)."""
        if token_ids.ndim != 2 or token_ids.shape[1] > self.context:
            raise ValueError(
                f"token ids have shape (batch, length up to {self.context}), and {token_ids.shape} was given"
            )
        batch, length = token_ids.shape
        return self.run(token_ids, whole(batch, length, token_ids.device))

    def logits(self, features: Tensor) -> Tensor:
        """The logits of the next token, from features."""
        return matmul(features, self.head_weight.T) if self.lm_head is None else self.lm_head(features)

    def forward(self, token_ids: Tensor) -> Tensor:
        """The logits of the token after each position, of shape (batch, length, vocab_size)."""
        return self.logits(self.features(token_ids))

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy; targets of -100 are ignored. The logits are never in memory as a whole."""
        features = self.features(token_ids)
        rows = reshape(features, (-1, features.shape[-1]))
        return F.linear_cross_entropy(rows, self.head_weight, reshape(targets, (-1,)))

    def _quantize_rest(self, quantized: Callable[[Tensor], Any]) -> None:
        """The embedding stays as it is, and the head is a quantized copy of it."""
        if self.lm_head is None:
            self.lm_head = quantized(self.head_weight)
        self._decoders = None  # whose programs have the weights from before

    def draw_weights(self) -> None:
        """Draw the weights anew, by the default generator, as before training."""
        generator = random.default_generator
        drawn: list[tuple[Tensor, Tensor]] = []
        for name, tensor in self.named_parameters():
            std = self.initial_std(name)
            if name.endswith("bias"):
                value = zeros(tensor.shape)
            elif std is None:
                continue
            else:
                value = generator.normal(tensor.shape, 0.0, std)
            drawn.append((tensor, value.to_device(tensor.device)))
        # In one run: otherwise each weight would be compiled separately.
        realize_together([value for _, value in drawn])
        for tensor, value in drawn:
            tensor._become(value._node)

    # Files

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: Where = None) -> Self:
        """The model of a folder in Hugging Face's layout: `penstock.models.load`, and of this class."""
        from penstock.models.loading import load

        model = load(folder, device=device)
        if not isinstance(model, cls):
            raise CheckpointError(f"{folder} holds a {type(model).__name__}, not a {cls.__name__}")
        return model

    def save(self, folder: str | Path, shard_bytes: int | str = "5GB") -> None:
        """Write a folder in Hugging Face's layout; weights of more than `shard_bytes` in several files."""
        from penstock.models.saving import save

        save(self, Path(folder), shard_bytes)

    # Generation

    @overload
    def generate(self, prompts: str | Sequence[int], max_tokens: int = ..., **options: Any) -> Completion: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], max_tokens: int = ..., **options: Any
    ) -> list[Completion]: ...

    def generate(self, prompts: Any, max_tokens: int = 128, **options: Any) -> Any:
        """What follows a prompt, or each of several: text if the model has a tokenizer, or token ids.

        The options are those of `penstock.models.Sampling`, and `stop`, `stop_tokens` and `seed`; what is not
        given is that of the model's `generation_config`. The result has `ids`, `text`, `logprobs` and
        `finish_reason`.
        """
        return completed(self, prompts, max_tokens, options)

    def stream(self, prompts: Any, max_tokens: int = 128, **options: Any) -> Iterator[Piece]:
        """Like `generate`, token by token: pieces with `id`, `text`, and the `index` of their prompt."""
        return streamed(self, prompts, max_tokens, options)
