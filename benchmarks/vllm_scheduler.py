"""CPU a token of vLLM's own scheduler, where it is installed: no model runs.

Its `schedule()` and `update_from_output()` are called for rows that all decode, with the KV
cache groups that it makes for Gemma 3: one of full layers, and five of window layers.
"""

import json
import os
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from tidegate.kvcache.layout import Tokens, page_count

PAGE_TOKENS = Tokens(16)
WINDOW_TOKENS = 512
WINDOW_GROUP_COUNT = 5
WARM_UP_STEP_COUNT = 20
SLICE_STEP_COUNT = 10
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def is_installed() -> bool:
    return find_spec("vllm") is not None


def vllm_us_per_token(row_count: int, context_tokens: int, step_count: int) -> float | None:
    """Microseconds of this thread's CPU, the median of slices of steps; None without vLLM."""
    if not is_installed():
        return None
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        steps = WARM_UP_STEP_COUNT + step_count
        scheduler = _scheduler(folder, row_count, context_tokens + steps + 1)
    _submit(scheduler, row_count, context_tokens, steps + 1)
    _step(scheduler)  # All prompts.
    for _ in range(WARM_UP_STEP_COUNT):
        assert _step(scheduler) == row_count
    slices: list[float] = []
    for _ in range(max(1, step_count // SLICE_STEP_COUNT)):
        begin = time.thread_time_ns()
        for _ in range(SLICE_STEP_COUNT):
            _step(scheduler)
        us = (time.thread_time_ns() - begin) / 1e3
        slices.append(us / SLICE_STEP_COUNT / row_count)
    return median(slices)


def _scheduler(model: str, row_count: int, length: int) -> Any:
    # By name, as type checkers do not find what is not installed.
    settings = import_module("vllm.config")
    kv_cache = import_module("vllm.v1.kv_cache_interface")
    pages = (1 + WINDOW_GROUP_COUNT) * row_count * (page_count(Tokens(length), PAGE_TOKENS) + 4)
    cache = settings.CacheConfig(block_size=PAGE_TOKENS, enable_prefix_caching=True)
    cache.num_gpu_blocks = pages
    config = settings.VllmConfig(
        model_config=settings.ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float32"
        ),
        cache_config=cache,
        scheduler_config=settings.SchedulerConfig(
            max_num_seqs=row_count,
            max_num_batched_tokens=1 << 20,
            max_model_len=MODEL["max_position_embeddings"],
            is_encoder_decoder=False,
        ),
    )
    shape = {"block_size": PAGE_TOKENS, "num_kv_heads": 1, "head_size": 16}
    float32 = import_module("torch").float32
    full = kv_cache.FullAttentionSpec(**shape, dtype=float32)
    window = kv_cache.SlidingWindowSpec(**shape, dtype=float32, sliding_window=WINDOW_TOKENS)
    specs = [full, *[window] * WINDOW_GROUP_COUNT]
    groups = [kv_cache.KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
    manager = import_module("vllm.v1.structured_output").StructuredOutputManager(config)
    return import_module("vllm.v1.core.sched.scheduler").Scheduler(
        config,
        kv_cache.KVCacheConfig(num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=groups),
        manager,
        block_size=PAGE_TOKENS,
    )


def _submit(scheduler: Any, row_count: int, context_tokens: int, output_tokens: int) -> None:
    sampling_params = import_module("vllm.sampling_params")
    requests = import_module("vllm.v1.request")
    hashes = import_module("vllm.v1.core.kv_cache_utils")
    sha256 = import_module("vllm.utils.hashing").sha256
    hashes.init_none_hash(sha256)
    hasher = hashes.get_request_block_hasher(PAGE_TOKENS, sha256)
    for number in range(row_count):
        sampling = sampling_params.SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, temperature=0
        )
        prompt = [3 + number % 900] * context_tokens
        name = str(number)
        request = requests.Request(name, prompt, sampling, None, block_hasher=hasher)
        scheduler.add_request(request)


def _step(scheduler: Any) -> int:
    """One step; returns how many tokens were sampled."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    scheduler.update_from_output(
        output,
        import_module("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
        ),
    )
    return len(names)
