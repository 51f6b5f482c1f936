"""What the models are made of besides products: embedding, head, norms."""

from typing import cast

import torch

from tidegate.engine.models.linear import Linear, Place

Weights = dict[str, torch.Tensor]


class Embedding:
    """Token vectors. `scale` multiplies them after it is rounded to the weights' type, as in
    Gemma's own code.
    """

    def __init__(self, weight: torch.Tensor, scale: float, place: Place) -> None:
        self.weight = place.put(weight)
        self._scale = float(torch.tensor(scale, dtype=place.dtype))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], float32."""
        vectors = self.weight.index_select(0, tokens).float()
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)


class Head:
    """Logits over the vocabulary, from a weight [vocabulary, hidden]."""

    def __init__(self, weight: torch.Tensor, place: Place) -> None:
        self._linear = Linear([weight], place)
        self._vocab_size = weight.shape[0]
        self._logits = torch.empty(0, device=place.device)

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary], float32. The next call overwrites it: fresh memory for so much
        costs a third of the product's time, in page faults.
        """
        logits = self._linear(vectors)
        if logits.dtype is torch.float32:
            return logits
        if self._logits.numel() < logits.numel():
            self._logits = torch.empty(logits.numel(), device=logits.device)
        return self._logits[: logits.numel()].view(logits.shape).copy_(logits)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(logits / cap), in place; the logits as they are if there is no cap."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def normalise(vectors: torch.Tensor, eps: float) -> torch.Tensor:
    """Float32 `vectors` divided by their root mean square over the last dimension."""
    return vectors * _inverse_rms(vectors, eps)


def normalise_in_place(vectors: torch.Tensor, eps: float) -> torch.Tensor:
    """`normalise` that overwrites its argument, and returns it."""
    return vectors.mul_(_inverse_rms(vectors, eps))


def _inverse_rms(vectors: torch.Tensor, eps: float) -> torch.Tensor:
    # The ignore: torch declares no type for this function.
    norm = cast(
        "torch.Tensor",
        torch.linalg.vector_norm(vectors, dim=-1, keepdim=True),  # pyright: ignore[reportUnknownMemberType]
    )
    return norm.square_().mul_(1.0 / vectors.shape[-1]).add_(eps).rsqrt_()
