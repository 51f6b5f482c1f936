"""Makes tiny random Hugging Face folders of several families, for tests.

`make_tiny_checkpoint` takes about 3 s for the first folder of a process (transformers has to
be imported) and a tenth of a second for each further one.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
)

TinyFamily = Literal["llama", "gemma3", "gemma4", "gpt_oss", "mimo_v2", "deepseek_v4"]

VOCAB_SIZE = 384

# Those of DeepSeek have wide bars, and a low one for a space.
DEEPSEEK_BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
DEEPSEEK_EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
DEEPSEEK_USER, DEEPSEEK_ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"

# Ids are the places in these lists. The names are those of the real models' tokenizers.
SPECIAL_TOKENS: dict[TinyFamily, list[str]] = {
    "llama": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gemma3": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "gemma4": ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"],
    "gpt_oss": [
        *("<|startoftext|>", "<|endoftext|>", "<|return|>"),
        *("<|start|>", "<|message|>", "<|end|>"),
    ],
    "mimo_v2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "deepseek_v4": [DEEPSEEK_BOS, DEEPSEEK_EOS, DEEPSEEK_USER, DEEPSEEK_ASSISTANT],
}
BOS_TOKEN: dict[TinyFamily, str | None] = {
    "llama": None,
    "gemma3": "<bos>",
    "gemma4": "<bos>",
    "gpt_oss": None,
    "mimo_v2": None,
    "deepseek_v4": DEEPSEEK_BOS,
}
EOS_TOKEN: dict[TinyFamily, str] = {
    "llama": "<|im_end|>",
    "gemma3": "<eos>",
    "gemma4": "<eos>",
    "gpt_oss": "<|return|>",
    "mimo_v2": "<|im_end|>",
    "deepseek_v4": DEEPSEEK_EOS,
}

# Typed loosely: the fields go in by name, from a dict that tests may extend.
TRANSFORMERS_CLASSES: dict[TinyFamily, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "mimo_v2": (MiMoV2FlashConfig, MiMoV2FlashForCausalLM),
    "deepseek_v4": (DeepseekV4Config, DeepseekV4ForCausalLM),
}

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TEMPLATE: dict[TinyFamily, str] = {
    "llama": CHATML_TEMPLATE,
    "gemma3": (
        "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
        "{{ message['content'] }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "gemma4": (
        "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n"
        "{{ message['content'] }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    ),
    "gpt_oss": (
        "{% for message in messages %}<|start|>{{ message['role'] }}<|message|>"
        "{{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
    ),
    "mimo_v2": CHATML_TEMPLATE,
    "deepseek_v4": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}"
        + DEEPSEEK_ASSISTANT
        + "{% else %}"
        + DEEPSEEK_USER
        + "{% endif %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}" + DEEPSEEK_ASSISTANT + "{% endif %}"
    ),
}

# Fields of transformers' configuration class, besides those that all families share.
OWN_FIELDS: dict[TinyFamily, dict[str, Any]] = {
    "llama": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "bos_token_id": None,
    },
    "gemma3": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "bos_token_id": SPECIAL_TOKENS["gemma3"].index("<bos>"),
        "pad_token_id": SPECIAL_TOKENS["gemma3"].index("<pad>"),
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 30.0,
        "sliding_window": 32,
        "bos_token_id": SPECIAL_TOKENS["gemma4"].index("<bos>"),
        "pad_token_id": SPECIAL_TOKENS["gemma4"].index("<pad>"),
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "bos_token_id": None,
    },
    "mimo_v2": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 33,
        "bos_token_id": None,
    },
    "deepseek_v4": {
        "intermediate_size": 32,  # Of each expert.
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 16,
        },
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        # With few heads scores would be 0 for several entries, and ties go either way.
        "index_n_heads": 64,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "bos_token_id": SPECIAL_TOKENS["deepseek_v4"].index(DEEPSEEK_BOS),
    },
}

CORPUS = [
    "The tide comes in through the gate and the water rises along the wall of the harbour.",
    "When the tide goes out again, the gate is closed and the boats wait for the next water.",
    "A keeper writes down the height of the water at every hour of the day and of the night.",
    "There are three boats in the harbour: one is green, one is white and one is not painted.",
    "What is the height of the wall? The wall is four metres high and the gate is three.",
    "Les bateaux attendent la marée; das Wasser steigt langsam; вода поднимается.",
]


def tiny_tokenizer(family: TinyFamily) -> Tokenizer:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` entries, which encodes any text.

    Its post-processor adds gemma3's begin-of-sequence token, if it is asked for special tokens.
    The same family always gives the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos_token = BOS_TOKEN[family]
    if bos_token is not None:
        bos_id = SPECIAL_TOKENS[family].index(bos_token)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, bos_id)]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS[family],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def make_tiny_checkpoint(
    folder: Path,
    family: TinyFamily,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes_max: int | None = None,
    classes: tuple[Any, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint into `folder` (made if missing) and return `folder`.

    `llama`: 4 layers, 4 heads of 16, 2 KV heads. `gemma3`: 5 layers of which the third is full
    and the others have a window of 32 tokens, 4 heads of 32, 1 KV head. `gemma4`: 6 layers of
    which every third is full, with 4 heads of 32 and 1 KV head whose projection gives the
    values too; the others have a window of 32 tokens, 4 heads of 16, 2 KV heads; the last 2
    share keys, and each layer has an input. `gpt_oss`: 4 layers, the first and the third with a
    window of 32 tokens, 4 heads of 16, 2 KV heads, 2 of 8 experts for each token. `mimo_v2`: 6
    layers, the first and the last full with 1 KV head, the others with a window of 33 tokens
    and 2 KV heads, keys of 24 and values of 16, 2 of 8 experts after the first.
    `deepseek_v4`: 4 layers with a window of 32 tokens, one without compressed entries, one with
    an entry for 16 tokens and two with one for 4, 4 heads of 32, 2 of 8 experts, 2 streams.
    All: hidden size 64, 384 tokens, 4,096 positions, tied embeddings. `overrides` are fields of
    transformers' configuration class, for example `num_hidden_layers=2` or `sliding_window=16`;
    a `num_hidden_layers` of a Gemma also sets `layer_types` (every third layer full) unless
    that is given. `shard_bytes_max` splits the weights into files of at most that size, with an
    index. `classes` are transformers' configuration and model of a relative of the family.
    The weights depend on `seed`, `family` and the sizes only.

    Norm weights and embeddings are drawn far from their neutral values, so that a forward pass
    which forgets one of them gives clearly other logits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = _random_model(family, classes, seed, overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_bytes_max or "1GB")
    tiny_tokenizer(family).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN[family],
        "eos_token": EOS_TOKEN[family],
        "add_bos_token": BOS_TOKEN[family] is not None,
        "chat_template": CHAT_TEMPLATE[family],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return folder


def _random_model(
    family: TinyFamily,
    classes: tuple[Any, Any] | None,
    seed: int,
    overrides: dict[str, Any],
) -> Any:
    config_class, model_class = classes or TRANSFORMERS_CLASSES[family]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": SPECIAL_TOKENS[family].index(EOS_TOKEN[family]),
    }
    fields |= OWN_FIELDS[family] | overrides
    if family in ("gemma3", "gemma4"):
        fields.setdefault("layer_types", _every_third_full(fields["num_hidden_layers"]))
    return randomise(model_class(config_class(**fields)), seed)


def randomise(model: Any, seed: int) -> Any:
    """Draw the weights of a model of transformers anew, and return it.

    Vectors, and buffers that are saved with the weights, come to lie around the values that
    the model begins with, so that a forward pass which forgets one of them gives clearly other
    logits.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict().keys()
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
    with torch.no_grad():
        for weight in (*model.parameters(), *buffers):
            noise = torch.randn(weight.shape, generator=generator)
            if not weight.is_floating_point():
                # A table of experts: for each token some, no one twice.
                count = model.config.num_local_experts
                order = torch.rand(len(weight), count, generator=generator)
                weight.copy_(order.argsort(1)[:, : weight.shape[1]])
            elif weight.ndim <= 1:
                weight.add_(0.2 * noise)
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
    return model


def _every_third_full(layer_count: int) -> list[str]:
    return [
        "full_attention" if (layer + 1) % 3 == 0 else "sliding_attention"
        for layer in range(layer_count)
    ]
