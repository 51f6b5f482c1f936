"""Makes the fixtures that the real models are compared with: greedy tokens of transformers.

    python tests/oracle/make_oracle.py gemma3-270m smollm2-135m

Takes some minutes for each model, most of it for reading its GGUF file into transformers. The
fixtures are kept in the repository; run this again only to change the prompts.

Everything is float32 and without a serving system's tricks: eager attention, one prompt at a
time. Prompts are pieces of `corpus.txt`, whose lengths lie on and around the edges of pages,
chunks and windows.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from oracle.cases import FIXTURES, Case, Oracle, TopLogits
from tidegate.engine.checkpoint.registry import open_checkpoint

NEW_TOKENS = 24
TOP_STEPS = (0, 1, 8, 23)
TOP_COUNT = 5
CHECK_DIFFERENCE_MAX = 1e-3

# Where in the corpus a prompt begins, in tokens, and its length with the begin token.
PIECES = (
    *((40 * n, length) for n, length in enumerate((1, 2, 5, 9, 24, 40))),
    *((300 + n, 15 + n) for n in range(3)),  # Around a page of 16.
    *((450 + n, 63 + n) for n in range(3)),  # Around four pages, and a small chunk.
    *((800 + n, 511 + n) for n in range(3)),  # Around a window, and a chunk of 512.
    *((100 + n, 527 + n) for n in range(3)),  # Around a window and a page.
    *((700 + n, 1023 + n) for n in range(3)),  # Around two windows, and two chunks.
    (0, 1100),
    (1200, 300),
    (1500, 767),
    (333, 1279),
    (60, 1537),
)


def make(model_name: str) -> Oracle:
    checkpoint = open_checkpoint(model_name)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    text = Path(__file__).with_name("corpus.txt").read_text()
    corpus: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    model = _float32_model(checkpoint.path)
    bos = [checkpoint.config.bos_id] if checkpoint.add_bos else []
    cases: list[Case] = []
    for first, length in PIECES:
        wanted = length - len(bos)
        prompt = bos + [corpus[(first + n) % len(corpus)] for n in range(wanted)]
        cases.append(_case(model, [token for token in prompt if token is not None]))
        print(model_name, len(prompt), f"{min(cases[-1].margins):.4f}", flush=True)
    return Oracle(model=model_name, cases=cases)


def _float32_model(gguf: Path) -> Any:
    # Its own types are partial.
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    model.generation_config.eos_token_id = None  # Goes on after an end token.
    return model.eval()


@torch.no_grad()
def _case(model: Any, prompt: list[int]) -> Case:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(output.logits).float()
    tokens: list[int] = output.sequences[0, len(prompt) :].tolist()
    # The same without a cache, as the cache of window layers has had its own faults.
    whole = model(output.sequences[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    difference = float((whole - logits).abs().max())
    assert difference < CHECK_DIFFERENCE_MAX, difference
    best = logits.topk(TOP_COUNT)
    assert [int(token) for token in best.indices[:, 0]] == tokens
    return Case(
        prompt=prompt,
        tokens=tokens,
        margins=[round(float(m), 5) for m in best.values[:, 0] - best.values[:, 1]],
        top=[
            TopLogits(
                step=step,
                ids=[int(token) for token in best.indices[step]],
                values=[round(float(value), 5) for value in best.values[step]],
            )
            for step in TOP_STEPS
        ],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        FIXTURES.mkdir(exist_ok=True)
        (FIXTURES / f"{name}.json").write_bytes(msgspec.json.encode(make(name)) + b"\n")
