"""Fields of the API that are not built, with the values besides null that ask for nothing.

Any other value is refused by name: an answer that ignores it would be a wrong one.
"""

from typing import TypeAlias

NotBuilt: TypeAlias = dict[str, tuple[object, ...]]

NOT_BUILT_IN_BOTH: NotBuilt = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
}
NOT_BUILT_IN_COMPLETIONS: NotBuilt = {
    **NOT_BUILT_IN_BOTH,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (),
}
NOT_BUILT_IN_CHAT: NotBuilt = {
    **NOT_BUILT_IN_BOTH,
    "logprobs": (False,),
    "top_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
}
