"""Fields that clients send and that need no code here: without effect, or accepted with a value that asks for nothing.

They are not declared in the request models (body.py reads these tables), so that one line a field is enough.
"""

from __future__ import annotations

from typing import Any

Neutral = dict[str, tuple[Any, ...]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# About billing, routing, storing and logging, or hints that a server may leave unused.
ANY_PROTOCOL = _names("""
    cache_control client_metadata context_management diagnostics extra_headers id_slot include_reasoning
    keep_alive kv_transfer_params max_tool_calls metadata mm_processor_kwargs models n_discard
    n_keep num_ctx plugins prediction priority prompt_cache_key prompt_cache_options prompt_cache_retention provider
    request_id return_progress route safety_identifier separate_reasoning service_tier session_id slot_id
    spaces_between_special_tokens store stream_reasoning transforms user verbosity
    """)
CACHE = _names("cache cache_prompt cache_salt")  # declared where text is generated
CHAT_ONLY = _names("chat_id features filter_ids params session tool_servers variables")  # Open WebUI
THINKING = _names("clear_thinking display keep")
MESSAGE = _names("annotations audio cache_control id provider_specific_fields reasoning_details refusal timestamp")
PART = _names("annotations cache_control citations logprobs")
CALL = _names("cache_control extra_content index provider_specific_fields")
TOOL = _names("allowed_callers cache_control defer_loading eager_input_streaming input_examples strict")
OLLAMA = _names("shift truncate")  # about prompts that are too long, which are refused here
OLLAMA_OPTIONS = _names("""
    draft_num_predict embedding_only f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep num_thread
    numa penalize_newline use_mlock use_mmap vocab_only
    """)
STREAM_OPTIONS = frozenset({"include_obfuscation"})

# Samplers and switches of vLLM, SGLang and llama.cpp that would change the text.
SAMPLERS: Neutral = {
    "adaptive_target": (-1,),
    "allowed_token_ids": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "prompt_logprobs": (),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "truncate_prompt_tokens": (),
    "typ_p": (1,),
    "typical": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
# Without effect while the sampler that they tune is off.
SAMPLER_SETTINGS = _names("""
    adaptive_decay dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent min_keep
    mirostat_eta mirostat_tau penalize_nl repeat_last_n samplers t_max_predict_ms xtc_threshold
    """)
OUTPUT: Neutral = {
    "add_special_tokens": (True, False),
    "detokenize": (True,),
    "include_stop_str_in_output": (False,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "parse_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "deepseek", "deepseek-legacy"),
    "response_fields": ([],),
    "return_hidden_states": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
}
CHAT: Neutral = {
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "web_search_options": (),
}
RESPONSES: Neutral = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled", "auto"),
}
MESSAGES: Neutral = {"container": (), "mcp_servers": ([],)}
