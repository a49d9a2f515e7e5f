"""Unsupported fields of other servers that change answers, and their neutral values.

Sources: public descriptions of llama.cpp, vLLM, SGLang, Ollama, TGI, text-generation-webui,
KoboldCpp, and of hosted APIs with OpenAI's protocol. A field that depends on a listed field is not
listed: it may be ignored if the listed field is off (`dry_base` without `dry_multiplier`).

Not for: fields of this server, or the treatment of fields (`unsupported_fields.py`).
"""

from __future__ import annotations

from typing import Any

from server.wire.unsupported_fields import Neutral


def _off(names: str, *values: Any, **options: str) -> dict[str, Neutral]:
    return {name: Neutral(*values, **options) for name in names.split()}


FOREIGN: dict[str, Neutral] = {
    # Samplers.
    **_off("mirostat mirostat_mode dynatemp_range xtc_probability dry_multiplier smoothing_factor top_a skew", 0),
    **_off("epsilon_cutoff eta_cutoff penalty_alpha nsigma min_keep n_indent no_repeat_ngram_size", 0),
    **_off("typical_p typical tfs tfs_z guidance_scale cfg_scale num_beams length_penalty", 1),
    **_off("encoder_repetition_penalty num_beam_groups", 1),
    **_off("top_n_sigma adaptive_target", -1),
    **_off("use_beam_search early_stopping dynamic_temperature temperature_last watermark watermarking", False),
    **_off("penalize_nl token_healing", False),
    **_off("do_sample", True, way_out="send temperature 0 for greedy decoding"),
    **_off("samplers sampler_order sampler_priority", way_out="the order of samplers is fixed"),
    **_off("logits_processors custom_logit_processor logit_bias_exp vllm_xargs", [], {}),
    **_off("negative_prompt", ""),
    **_off("repetition_detection"),
    **_off("post_sampling_probs", False, way_out="logprobs are the model's, before sampling"),
    **_off("repeat_last_n penalty_last_n repetition_penalty_range rep_pen_range", -1)
    | _off("rep_pen", way_out="send repetition_penalty"),
    # Other names of supported fields.
    **_off("sampling_seed sampler_seed", way_out="send seed"),
    **_off("n_predict num_predict", -1, way_out="send max_tokens"),
    **_off("max_new_tokens max_length", way_out="send max_tokens"),
    **_off("min_new_tokens min_length", 0, way_out="send min_tokens"),
    **_off("n_cmpl", 1, way_out="send n"),
    **_off("stop_sequences stop_sequence stopping_strings custom_stopping_strings", [], "", way_out="send stop"),
    **_off("stop_regex", [], "", way_out="send stop, with whole strings"),
    **_off("no_stop_trim", False, way_out="send include_stop_str_in_output"),
    **_off("ban_eos_token", False, way_out="send ignore_eos"),
    **_off("banned_tokens banned_strings custom_token_bans", [], "", way_out="send bad_words"),
    **_off("truncate", way_out="send truncate_prompt_tokens"),
    **_off("return_full_text", False, way_out="send echo"),
    **_off("t_max_predict_ms", 0, -1, way_out="the operator sets it (--request-timeout)"),
    # Structured output.
    **_off("regex", way_out='send structured_outputs {"regex": ...}'),
    **_off("json_schema", way_out='send structured_outputs {"json": ...}'),
    **_off("ebnf grammar grammar_string", "", way_out='send structured_outputs {"grammar": ...}, in Lark or GBNF'),
    **_off("structural_tag", way_out="send tools, or structured_outputs"),
    **_off("guided_whitespace_pattern", way_out='send structured_outputs {"json": ..., "whitespace_pattern": ...}'),
    **_off("format", "", way_out="send response_format"),
    **_off("output_format", way_out="send output_config.format on /v1/messages, response_format on the others"),
    # Prompts and templates.
    **_off("chat_template template", "", way_out="the operator sets it (--chat-template)"),
    **_off("tool_prompt guideline generation_prompt", ""),
    **_off("input_prefix input_suffix", "", way_out="send prompt and suffix to /v1/completions, or use /infill"),
    **_off("raw safe_prompt", False),
    **_off("add_bos_token", True, way_out="send add_special_tokens on /v1/completions"),
    **_off("context images image_data input_extra transforms plugins", []),
    **_off("prompt_embeds input_embeds prompt_mode session_params"),
    **_off("inputs input_ids", way_out="send prompt or messages"),
    # Thinking.
    **_off("think", way_out="send reasoning_effort or enable_thinking"),
    **_off("thinking_budget reasoning_budget reasoning_budget_tokens reasoning_max_tokens", -1),
    # Objects of settings, and other models.
    **_off("options parameters sampling_params extra_body", {}, way_out="send its fields at the top"),
    **_off(
        "lora lora_path lora_request adapter_id",
        [],
        "",
        way_out="name the adapter of --lora-modules as the model",
    ),
    **_off("enable_search", False),
    **_off("search_parameters search_settings citation_options"),
}
