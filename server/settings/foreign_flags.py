"""Flags of vLLM, SGLang and llama.cpp's server, translated to settings of this one.

Each flag is another name of a setting, has no effect here (one log line), or is refused with
advice. No flag that would change an answer is dropped. The keys of a --config file are translated
in the same way.
"""

from __future__ import annotations

import ast
import itertools
import json
import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.api import MTP, ConfigError
from server.wire.suggest import did_you_mean

log = logging.getLogger("polydraft")

SAME = {
    **dict.fromkeys(("m", "model_path", "hf", "hf_repo"), "model"),
    **dict.fromkeys(
        ("md", "model_draft", "hfd", "hf_repo_draft", "speculative_model", "speculative_draft_model_path"),
        "draft_model",
    ),
    **dict.fromkeys(
        ("num_speculative_tokens", "speculative_num_steps", "draft", "draft_max", "draft_n"), "draft_length"
    ),
    **dict.fromkeys(("tp", "tp_size"), "tensor_parallel_size"),
    **dict.fromkeys(("c", "ctx_size", "context_length"), "max_model_len"),
    **dict.fromkeys(("np", "parallel", "max_running_requests"), "max_num_seqs"),
    **dict.fromkeys(("t", "threads"), "num_threads"),
    **dict.fromkeys(("q",), "quantization"),
    **dict.fromkeys(("a", "alias"), "served_model_name"),
    "lora_paths": "lora_modules",
    "chat_template_file": "chat_template",
    "disable_cuda_graph": "enforce_eager",
    "log_requests": "enable_log_requests",
    "max_queued_requests": "max_num_queued_reqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "cache_prompt": "enable_prefix_caching",
    "page_size": "block_size",
    "reasoning_format": "reasoning_parser",
    "spec_type": "spec_drafters",
    "speculative_eagle_topk": "num_drafts",
    "tokenizer_path": "tokenizer",
}
"""Settings by their names in other servers."""

OPPOSITE = {
    "disable_log_requests": "enable_log_requests",
    "disable_log_stats": "enable_log_stats",
    "disable_radix_cache": "enable_prefix_caching",
}
"""Switches of other servers that turn off a setting of this one."""

VALUES = {
    "dtype": {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"},
    "generation_config": {"vllm": "neutral"},
    "spec_drafters": {
        "none": "model",
        **dict.fromkeys(("ngram-cache", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"), "prompt_lookup"),
    },
    "reasoning_parser": {
        "deepseek": "auto",
        "deepseek-r1": "deepseek_r1",
        "openai_gptoss": "harmony",
        "gpt-oss": "harmony",
    },
}
"""Values of settings, translated."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Flag of another server that corresponds to no setting here."""

    text: str
    """Reason why it has no effect, or advice."""
    is_refused: bool = False
    accepts: tuple[str, ...] = ()
    """Values with which a refused flag has no effect."""
    is_switch: bool = False
    """Whether it takes no value."""


def _ignored(text: str, switches: str = "", values: str = "") -> dict[str, Foreign]:
    """Return flags that do not affect answers; names: separated by spaces."""
    switch = Foreign(text=text, is_switch=True)
    value = Foreign(text=text)
    return dict.fromkeys(switches.split(), switch) | dict.fromkeys(values.split(), value)


def _refused(text: str, switches: str = "", values: str = "", accepts: tuple[str, ...] = ()) -> dict[str, Foreign]:
    """Return flags refused unless without effect; names are separated by spaces."""
    switch = Foreign(text=text, is_refused=True, is_switch=True)
    value = Foreign(text=text, is_refused=True, accepts=accepts)
    return dict.fromkeys(switches.split(), switch) | dict.fromkeys(values.split(), value)


_SHAPED = "drafts are shaped by --num-drafts, --draft-length and --draft-tree"

FOREIGN: dict[str, Foreign] = {
    **_ignored(
        "it is always on",
        "enable_auto_tool_choice enable_prompt_tokens_details enable_metrics metrics jinja cb "
        "cont_batching enable_chunked_prefill",
    ),
    **_ignored(
        "what is compiled or recorded is measured and chosen at start",
        "enable_torch_compile disable_custom_all_reduce disable_cascade_attn disable_overlap_schedule "
        "async_scheduling enable_mixed_chunk use_v2_block_manager mlock mmap enable_expert_parallel",
        "compilation_config O optimization_level attention_backend sampling_backend cuda_graph_max_bs cuda_graph_bs "
        "max_seq_len_to_capture distributed_executor_backend swap_space cpu_offload_gb max_parallel_loading_workers "
        "fa flash_attn b batch_size ub ubatch_size tb threads_batch safetensors_load_strategy",
    ),
    **_ignored("--lora-modules decides", "enable_lora", "max_loras max_lora_rank max_cpu_loras lora_dtype"),
    **_ignored("--device decides", values="ngl gpu_layers n_gpu_layers"),
    **_ignored(
        "the scheduler decides (--max-prompt-tokens-per-step limits prompts)",
        values="chunked_prefill_size max_num_partial_prefills max_long_partial_prefills num_scheduler_steps "
        "long_prefill_token_threshold preemption_mode schedule_policy schedule_conservativeness stream_interval "
        "num_lookahead_slots prefix_caching_hash_algo",
    ),
    **_ignored("--log-level decides", values="uvicorn_log_level log_level_http max_log_len"),
    **_ignored("the server reads text only", values="limit_mm_per_prompt mm_processor_kwargs"),
    **_ignored(
        "grammars are followed by llguidance",
        values="guided_decoding_backend structured_outputs_config grammar_backend",
    ),
    **_ignored("code of a model is never run", values="code_revision"),
    **_ignored("up to 20 are served", values="max_logprobs"),
    **_ignored("seeds are given by requests (field seed)", values="seed random_seed s"),
    **_ignored(
        "a step has at most --num-drafts x --draft-length draft tokens",
        values="speculative_num_draft_tokens",
    ),
    **_ignored(
        _SHAPED,
        values="draft_min draft_p_min ngram_prompt_lookup_max "
        "ngram_prompt_lookup_min speculative_draft_tensor_parallel_size speculative_disable_by_batch_size",
    ),
    **_refused(
        "code of a model is never run, as it could do anything on this machine. Leave it out: the families of "
        "docs/models.md need none",
        "trust_remote_code",
    ),
    **_refused(
        "keys and values have one type; choose it by --kv-cache-dtype (float32 or bfloat16), or leave it out",
        values="ctk ctv cache_type_k cache_type_v",
        accepts=("auto",),
    ),
    **_refused(
        "name a folder with safetensors or a GGUF file",
        values="load_format",
        accepts=("auto", "safetensors", "hf", "gguf"),
    ),
    **_refused("name the file with the repository: OWNER/REPOSITORY:FILE", values="hff hf_file"),
    **_refused("the tokenizer is the model's tokenizer.json", values="tokenizer_mode", accepts=("auto", "hf")),
    **_refused("the tokenizer is of --revision; give a folder by --tokenizer", values="tokenizer_revision"),
    **_refused("the chat template decides", values="chat_template_content_format", accepts=("auto",)),
    **_refused("answers have the role assistant", values="response_role", accepts=("assistant",)),
    **_refused("the server generates text only", "is_embedding", "task runner", accepts=("auto", "generate")),
    **_refused(
        "requests are served by priority, then in order", values="scheduling_policy", accepts=("fcfs", "priority")
    ),
    **_refused(
        "start one daemon for each replica and balance between them (docs/deploy.md)",
        values="dp dp_size data_parallel_size api_server_count",
        accepts=("1",),
    ),
    **_refused(
        "split the target by --tensor-parallel-size", values="pp pp_size pipeline_parallel_size nnodes", accepts=("1",)
    ),
    **_refused("split the target by --tensor-parallel-size", values="sm split_mode ts tensor_split", accepts=("none",)),
    **_refused("name one adapter in peft's format: --lora-modules NAME=PATH", values="lora lora_scaled"),
    **_refused(
        "write it into the model's config.json",
        "disable_sliding_window",
        "rope_scaling rope_theta hf_overrides json_model_override_args rope_freq_base rope_freq_scale override_kv",
    ),
    **_refused(
        "send it in requests, or write it into the model's generation_config.json",
        values="override_generation_config temp temperature top_k top_p min_p repeat_penalty presence_penalty "
        "frequency_penalty",
    ),
    **_refused("send max_tokens in requests", values="n predict n_predict"),
    **_refused("send chat_template_kwargs in requests", values="default_chat_template_kwargs"),
    **_refused("send stream_options.include_usage in requests", "enable_force_include_usage"),
    **_refused("set HF_TOKEN in the environment, where `ps` does not show it", values="hf_token"),
    **_refused("set POLYDRAFT_API_KEY in the environment", values="api_key_file"),
    **_refused("set HF_HUB_CACHE in the environment", values="download_dir"),
    **_refused("draft by a small model of the same tokens, or by prompt_lookup", values="speculative_token_map"),
    **_refused(
        "only exact rules are the default; a request may ask for more with --max-over-acceptance",
        values="spec_decoding_acceptance_method",
        accepts=("rejection_sampler",),
    ),
    **_refused(
        "leave it out, it is not served", values="kv_transfer_config logits_processors middleware control_vector"
    ),
}

LONGEST_SHORT = 3
"""Most letters of a flag that may have one dash."""
NAMES = frozenset({*SAME, *OPPOSITE, *FOREIGN, "speculative_config", "speculative_algorithm"})
_FOREIGN_SWITCHES = [name for name, foreign in FOREIGN.items() if foreign.is_switch]
SWITCHES = frozenset({*OPPOSITE, "cache_prompt", "disable_cuda_graph", "log_requests", *_FOREIGN_SWITCHES})

_HEAD_METHODS = ("eagle3", "peagle", "dflash", "dflash2", "dspark")
"""Methods of trained heads: the head's own config.json says what it is."""
_MTP_METHODS = ("mtp", "glm4_moe_mtp", "nextn")
"""Methods of the MTP module inside the target."""
_SHAPES_DRAFTS = "--num-drafts, --draft-length and --draft-tree shape drafts"
_METHOD_KEYS = ("rejection_sample_method", "acceptance_method", "draft_sample_method")
_EXACT_METHODS = ("rejection_sampler", "strict", "probabilistic", "standard")
_SPECULATION_IGNORED = frozenset(
    "prompt_lookup_max prompt_lookup_min draft_tensor_parallel_size disable_by_batch_size max_model_len enforce_eager "
    "disable_padded_drafter_batch disable_logprobs parallel_drafting attention_backend".split()
)
_SPECULATION_KEYS = (
    *("method", "model", "num_speculative_tokens", "speculative_token_tree", "revision", "quantization"),
    *_SPECULATION_IGNORED,
)


def translate(given: Mapping[str, Any], shown: str = "--{}") -> dict[str, Any]:
    """Return this server's settings for names and values of any server.

    Unknown names are returned unchanged. shown: spelling of a name in messages, as a format. Raises
    ConfigError for a flag that would change an answer and is not supported, and for two names of
    one setting with different values.
    """
    result: dict[str, Any] = {}
    name_of: dict[str, str] = {}
    for key, value in given.items():
        name = shown.format(key.replace("_", "-"))
        if len(key) <= LONGEST_SHORT:
            name = name.replace("--", "-")
        for setting, translated in _settings(key, value, name).items():
            if setting in result and result[setting] != translated:
                shown_setting = setting.replace("_", "-")
                raise ConfigError(f"{name_of[setting]} and {name} both set {shown_setting}; give one of them")
            result[setting] = translated
            name_of[setting] = name
    return result


def _settings(key: str, value: Any, name: str) -> dict[str, Any]:
    """Return the settings that one flag of any server sets; name: its spelling in messages."""
    if key in FOREIGN:
        _check(FOREIGN[key], name, value)
        return {}
    if key in OPPOSITE:
        return {OPPOSITE[key]: not value}
    if key == "speculative_config":
        return _speculation(_read_speculation(value, name), name)
    if key == "speculative_algorithm":
        return _speculation({"method": str(value).lower()}, name)
    if key == "speculative_model" and value in ("ngram", "[ngram]"):
        return {"spec_drafters": "prompt_lookup"}
    setting = SAME.get(key, key)
    if isinstance(value, str):
        value = VALUES.get(setting, {}).get(value, value)
    return {setting: value}


def _check(foreign: Foreign, name: str, value: Any) -> None:
    """Log a flag without effect; raise ConfigError for one that is refused."""
    if value is False or value is None or str(value).lower() in foreign.accepts:
        return
    if foreign.is_refused:
        got = "" if foreign.is_switch else f" {value}"
        raise ConfigError(f"{name}{got}: not served; {foreign.text}")
    log.warning("%s has no effect here: %s", name, foreign.text)


def _read_speculation(value: Any, name: str) -> dict[str, Any]:
    """Return the object of a --speculative-config, of JSON or a file; with underscores."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f'{name}: not valid JSON ({error}); quote it, as in \'{{"model": "DRAFT", '
                '"num_speculative_tokens": 5}\''
            ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be a JSON object")
    return {str(key).replace("-", "_"): setting for key, setting in value.items()}


def _speculation(asked: dict[str, Any], name: str) -> dict[str, Any]:
    """Return settings for vLLM's speculative_config (or SGLang's algorithm)."""
    _check_speculation(asked, name)
    settings = _drafter_settings(asked, name)
    if asked.get("speculative_token_tree") is not None:
        settings |= _tree_settings(asked["speculative_token_tree"], name)
    return {setting: value for setting, value in settings.items() if value is not None}


def _tree_settings(tree: Any, name: str) -> dict[str, Any]:
    """Return settings for vLLM's tree, a list of paths of child numbers.

    None, with a log line, if nodes of a depth have different numbers of children. Raises
    ConfigError for anything else.
    """
    place = f"{name} speculative_token_tree"
    try:
        paths = {tuple(map(int, path)) for path in ast.literal_eval(str(tree))}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{place}: not a list of paths such as [(0,), (1,), (0, 0)] ({error})") from error
    depth = max(map(len, paths), default=0)
    widths = [1 + max(path[level] for path in paths if len(path) > level) for level in range(depth)]
    num_nodes = sum(itertools.accumulate(widths, operator.mul))
    has_negative = any(child < 0 for path in paths for child in path)
    if () in paths or has_negative or num_nodes != len(paths):
        log.warning("%s has no effect here: nodes of a depth need as many children (--draft-tree)", place)
        return {}
    rule = None
    if any(width > 1 for width in widths[1:]):
        rule = "traversal"  # the default rule verifies chains that share no token
    return {"draft_length": None, "draft_tree": ",".join(map(str, widths)), "spec_rule": rule}


def _check_speculation(asked: dict[str, Any], name: str) -> None:
    """Raise ConfigError for keys that may change answers; log those without effect."""
    for key, value in asked.items():
        if key in _METHOD_KEYS:
            if value not in (None, *_EXACT_METHODS):
                raise ConfigError(f"{name} {key} {value}: not served, as it may change answers; leave it out")
        elif key not in _SPECULATION_KEYS:
            raise ConfigError(f"{name}: unknown key {key!r}{did_you_mean(key, _SPECULATION_KEYS)}")
        elif key in _SPECULATION_IGNORED:
            log.warning("%s: %s has no effect here: %s", name, key, _SHAPES_DRAFTS)
    if asked.get("quantization") is not None:
        raise ConfigError(f"{name}: quantization is read from the draft model's config.json; leave it out")


def _drafter_settings(asked: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the drafter's settings; None for settings that keep their default."""
    method = asked.get("method")
    model = asked.get("model")
    num_tokens = asked.get("num_speculative_tokens")
    names_ngram = method is None and model in ("ngram", "[ngram]")
    if method in ("ngram", "ngram_gpu") or names_ngram:
        return {"spec_drafters": "prompt_lookup", "max_copied_tokens": num_tokens}
    if method in _MTP_METHODS:
        for key in ("model", "revision"):
            if asked.get(key) is not None:
                raise ConfigError(f"{name} method {method}: the module is inside the target; leave out {key}")
        return {"draft_model": MTP, "draft_length": num_tokens}
    if method in (None, "draft_model", "standalone", *_HEAD_METHODS):
        # SGLang's algorithm is one flag, and the model another.
        is_algorithm = name.endswith("algorithm") and method in ("standalone", *_HEAD_METHODS)
        if model is None and not is_algorithm:
            raise ConfigError(f'{name}: names no draft model; add "model", or "method": "ngram"')
        return {"draft_model": model, "draft_length": num_tokens, "draft_revision": asked.get("revision")}
    raise ConfigError(
        f"{name} method {method}: not served; draft by a small model of the same tokens (draft_model), by a head "
        f"({', '.join(_HEAD_METHODS)}), by the target's mtp module, or by ngram"
    )
