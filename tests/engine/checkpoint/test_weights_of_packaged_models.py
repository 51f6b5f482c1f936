"""The packaged models' weights, against those that transformers makes of the same files."""

from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from tidegate.engine.checkpoint.registry import open_checkpoint
from tidegate.engine.checkpoint.weights import load_weights


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_packaged_weights_are_those_that_transformers_holds(model: str) -> None:
    checkpoint = open_checkpoint(model)
    weights = load_weights(checkpoint, torch.float32)
    oracle = cast("Any", AutoModelForCausalLM).from_pretrained(
        checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
    )
    expected: dict[str, torch.Tensor] = dict(oracle.state_dict())
    del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        if model == "gemma3-270m" and tensor.ndim == 1:
            # transformers takes 1 from the stored norm and adds it again when it runs.
            assert torch.allclose(weights[name], tensor + 1, rtol=0, atol=1e-6), name
        else:
            assert torch.equal(weights[name], tensor), name
