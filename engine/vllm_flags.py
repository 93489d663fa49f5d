"""Flags of `vllm serve` 0.31 to 0.33, arguments of their EngineArgs, and what a worker does with each.

An argument is *passed* to vLLM, *mapped* to a setting of the worker, *kept* (Tandem sets it, and a flag may only repeat
Tandem's value), or *refused* with the reason. Known without vLLM: a worker's front has another environment. The test
beside vLLM's own parser holds that every argument is in exactly one of these tables, with all its spellings.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from engine.errors import EngineStartError

_PASSED = {
    "model and weights": (
        "trust_remote_code seed max_model_len quantization quantization_config allow_deprecated_quantization"
        " enforce_eager disable_sliding_window disable_cascade_attn config_format code_revision hf_overrides"
        " model_class_overrides model_impl tokenizer_mode language_model_only limit_mm_per_prompt skip_mm_profiling"
        " mm_encoder_tp_mode mm_encoder_attn_backend mm_processor_cache_gb mm_processor_cache_type"
        " mm_processor_kwargs disable_chunked_mm_input"
        " load_format safetensors_load_strategy safetensors_prefetch_num_threads"
        " safetensors_prefetch_block_size model_loader_extra_config use_tqdm_on_load pt_load_map_location"
        " max_parallel_loading_workers offload_backend cpu_offload_gb cpu_offload_params offload_group_size"
        " offload_num_in_group offload_prefetch_step offload_params engram_config runner convert pooler_config"
    ),
    "memory and KV": (
        "gpu_memory_utilization num_gpu_blocks_override kv_cache_dtype kv_cache_dtype_skip_layers"
        " kv_sharing_fast_prefill swa_bounded_replay prefix_cache_retention_interval"
        " disable_hybrid_kv_cache_manager"
    ),
    "kernels and compilation": (
        "attention_backend attention_config compilation_config cudagraph_capture_sizes"
        " max_cudagraph_capture_size optimization_level performance_mode kernel_config ir_op_priority"
        " enable_flashinfer_autotune moe_backend linear_backend sparse_indexer_topk_backend monokernel"
        " disable_custom_all_reduce additional_config"
    ),
    "recurrent layers": (
        "mamba_backend mamba_config mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding"
        " mamba_cache_philox_rounds mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode"
        " enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm"
        " gdn_prefill_backend kda_prefill_backend kda_decode_backend"
    ),
    "speculation": "speculative_config spec_method spec_model spec_tokens",
    "experts and data-parallel ranks": (
        "enable_expert_parallel enable_ep_weight_filter all2all_backend enable_eplb eplb_config"
        " expert_placement_strategy enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"
        " dp_sync_interval disable_nccl_for_dp_synchronization"
    ),
    "scheduling, sampling, ranks, adapters, debugging": (
        "max_num_scheduled_tokens async_scheduling use_fp64_gumbel structured_outputs_config"
        " max_num_seqs max_num_active_seqs long_prefill_token_threshold long_prefill_token_threshold_adaptive"
        " scheduler_reserve_full_isl distributed_timeout_seconds cpu_distributed_timeout_seconds enable_hc_sp"
        " max_loras max_lora_rank lora_dtype lora_target_modules fully_sharded_loras specialize_active_lora"
        " enable_mixed_moe_lora_format enable_moe_shared_loras enable_layerwise_nvtx_tracing jit_monitor_mode"
        " jit_monitor_verbose fail_on_environ_validation"
    ),
}
PASSED = frozenset(" ".join(_PASSED.values()).split())
"""Arguments that take effect within vLLM's EngineCore, and so under Tandem. Tandem's loop reads dp_sync_interval."""

OF_PREPROCESSORS = frozenset(
    (
        *("max_model_len", "limit_mm_per_prompt", "mm_processor_kwargs", "tokenizer_mode", "trust_remote_code"),
        *("hf_overrides", "model_class_overrides", "model_impl", "config_format", "code_revision"),
    )
)
"""Passed arguments that decide what pictures, sounds and videos become before the encoder reads them."""
OF_ENCODERS = OF_PREPROCESSORS | {"quantization", "quantization_config", "load_format", "mm_encoder_attn_backend"}
"""Passed arguments that decide what a model's encoder computes, and how it is loaded."""

MAPPED = {
    "model": "model",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel",
    "data_parallel_rank": "data_parallel_rank",
    "data_parallel_start_rank": "data_parallel_rank",
    "data_parallel_size_local": "data_parallel_local",
    "data_parallel_address": "data_parallel_address",
    "data_parallel_rpc_port": "data_parallel_port",
    "nnodes": "nodes",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
    "block_size": "block_tokens",
    "max_num_batched_tokens": "max_batch_tokens",
    "dtype": "dtype",
    "kv_cache_memory_bytes": "kv_memory_mib",
}
"""Setting of the worker for an argument. vLLM counts KV bytes of a GPU, Tandem MiB of all ranks together."""

KEPT: dict[str, tuple[tuple[str, ...], str]] = {
    "enable_prefix_caching": (("true",), "loans need the prefix cache"),
    "enable_chunked_prefill": (("true",), "max_prefill_tokens cuts prompts in chunks"),
    "scheduling_policy": (("priority",), "requests have priorities"),
    "disable_log_stats": (("true",), "metrics are the worker's: set metrics_port"),
    "distributed_executor_backend": (("mp",), "Tandem starts the ranks of a worker itself, by mp"),
    "enable_lora": (("true",), "set adapters: {NAME: PATH}"),
    "generation_config": (
        ("auto",),
        "the router takes defaults from the model's generation_config.json: change it there, or ask in the request",
    ),
    "data_parallel_external_lb": (("true",), "each data-parallel rank is a worker of its own"),
    "data_parallel_backend": (("mp",), "each data-parallel rank is a worker of its own"),
    "prefill_context_parallel_size": (("1",), "a rank must have KV of whole contexts: set tensor_parallel"),
    "decode_context_parallel_size": (("1",), "a rank must have KV of whole contexts: set tensor_parallel"),
    "headless": (("true", "false"), "a worker has no HTTP API on any node"),
}
"""Values that a flag may have, since they change nothing, and why it may have no other."""

_OF_ROUTER = "the HTTP API is the router's"
REFUSED: dict[str, str] = {
    "the model is the setting model, with its own config.json": "model_tag hf_config_path model_weights",
    "Tandem fetches the model: set model to org/name@revision, and HF_HUB_CACHE for the folder": (
        "download_dir revision ignore_patterns"
    ),
    "a command line shows it to all users of the machine: set HF_TOKEN in the worker's environment": "hf_token",
    "write the flags themselves into vllm_args": "config help",
    "the tokenizer is the model's own; vLLM has it for grammars, where there is one": (
        "tokenizer tokenizer_revision skip_tokenizer_init"
    ),
    "receipts count the drafts of each request: ask by receipt: true": "per_request_spec_decode_metrics",
    "a diffusion model writes a block of tokens again and again, so none of its KV can be named": "diffusion_config",
    "each data-parallel rank is a worker of its own, with data_parallel_rank": (
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb"
        " data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s"
        " dp_supervisor_probe_failure_threshold"
    ),
    "a lost rank ends its group, and its streams go on at workers of other groups": (
        "enable_fault_tolerance fault_tolerance_config"
    ),
    "the size of a group is fixed while it lives: start another group": "enable_elastic_ep elastic_ep_max_dp_size",
    "a rank must have KV of whole contexts: set tensor_parallel": (
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size"
    ),
    "Tandem starts the ranks of a worker itself: set tensor_parallel, pipeline_parallel and nodes": (
        "ray_workers_use_nsight worker_cls worker_extension_cls"
        " enable_shm_tensor_arena _api_process_count _api_process_rank"
    ),
    "set CUDA_VISIBLE_DEVICES in the worker's environment": "device_ids",
    "set cores": "numa_bind numa_bind_nodes numa_bind_cpus",
    "Tandem moves and announces KV itself: leave it out": (
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config"
    ),
    "it would replace Tandem's connector by vLLM's: set kv_store": "kv_offloading_size kv_offloading_backend",
    "Tandem names blocks by its own hash": "prefix_caching_hash_algo",
    "a block that ends in mid-block is written on after it has its name, so it cannot be verified": "prefix_match_unit",
    "the pool must keep its addresses, and nothing wakes a worker: stop it, or scale the pool": (
        "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
        " enable_cumem_allocator enable_nccl_comm_suspend"
    ),
    "KV is named after the weights, which may not change: start another worker": "weight_transfer_config",
    "Tandem sets the tokens of each step: set max_batch_tokens and max_prefill_tokens": ("prefill_schedule_interval"),
    "Tandem admits requests: set max_queued of the router, and reserve_output_tokens of the worker": (
        "max_num_queued_reqs max_num_queued_tokens watermark scheduler_cls"
    ),
    "a stream may move between workers, so what it samples depends on its request alone": (
        "logits_processors enable_batch_sharded_sampling watermark_config return_sampling_mask enable_trace_replay"
    ),
    "log probabilities are the model's own, before all options; their number is limited by the router": (
        "max_logprobs logprobs_mode"
    ),
    "the router takes defaults from the model's generation_config.json: change it there, or ask in the request": (
        "override_generation_config"
    ),
    "the router finds reasoning: set models: [{path: ..., reasoning_parser: NAME}] there": (
        "reasoning_parser reasoning_parser_plugin reasoning_config"
    ),
    "answers of this API have no such data": "enable_return_routed_experts aux_output_config",
    "pooling models give one vector for each prompt: embeddings, or probabilities of labels": (
        "enable_flash_late_interaction max_lora_cls_labels io_processor_plugin"
    ),
    "prompts are texts or token ids": "enable_prompt_embeds",
    "a preprocessor reads files and gives vLLM their tensors": (
        "allowed_local_media_path allowed_media_domains enable_mm_embeds interleave_mm_strings"
        " media_io_kwargs mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only"
        " mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path"
        " mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method mm_tensor_ipc"
        " mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize trust_request_mm_kwargs"
        " enable_mm_processor_stats default_mm_loras enable_tower_connector_lora"
    ),
    "set adapters: {NAME: PATH}": "lora_modules max_cpu_loras",
    "metrics are the worker's and the router's: set metrics_port": (
        "show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets"
        " cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details"
    ),
    "traces are the router's: set otlp_endpoint there": "otlp_traces_endpoint collect_detailed_traces",
    "nothing starts vLLM's profiler here": "profiler_config",
    "it watches vLLM's own loop, and Tandem's runs here": "watchdog_config",
    "logs are Tandem's: set log_level and log_format": (
        "logging_config log_level log_config_file aggregate_engine_logging"
    ),
    "set drain_s": "shutdown_timeout",
    f"{_OF_ROUTER}: set models: [{{path: ..., name: NAME}}] there": "served_model_name",
    f"{_OF_ROUTER}: set host and http_port there (gRPC: port)": "host port uds grpc grpc_port",
    f"{_OF_ROUTER}: set api_keys_file there": "api_key",
    f"{_OF_ROUTER}: set tls_public_cert and tls_public_key there (clients: tls_client_ca)": (
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh"
    ),
    f"{_OF_ROUTER}: it finds tool calls by itself, or set models: [{{path: ..., tool_parser: NAME}}] there": (
        "enable_auto_tool_choice tool_call_parser"
    ),
    f"{_OF_ROUTER}, which has the model's own chat template: put one into the model's directory": (
        "chat_template chat_template_content_format trust_request_chat_template response_role cohere_format"
        " cohere_is_reasoning_model"
    ),
    f"{_OF_ROUTER}: ask by chat_template_kwargs in the request": "default_chat_template_kwargs",
    f"{_OF_ROUTER}: set records_file and record_texts there to keep prompts and answers": (
        "enable_log_requests enable_log_outputs enable_log_deltas max_log_len"
    ),
    f"{_OF_ROUTER}: start more routers": "api_server_count",
    f"{_OF_ROUTER}, and its answers have a receipt of times and cached tokens: ask by receipt: true": (
        "enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking"
    ),
    f"{_OF_ROUTER}, which has no such setting": (
        "exclude_tools_when_tool_choice_none tool_parser_plugin tool_strict_level tool_server"
        " return_tokens_as_token_ids enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint"
        " anthropic_disabled_thinking_effort log_error_stack tokens_only enable_scale_out fingerprint_mode"
        " fingerprint_value uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints"
        " allow_credentials allowed_origins allowed_methods allowed_headers root_path middleware"
        " enable_request_id_headers disable_fastapi_docs h11_max_incomplete_event_size h11_max_header_count"
        " enable_offline_docs renderer_num_workers stream_interval reasoning_effort_map"
    ),
}
"""Refused arguments by reason. Each would be wrong or without effect, because vLLM's server or frontend reads it, or
because Tandem does that part."""

REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}
"""Reason of each refused argument."""
OF_ROUTER = {"served_model_name": "name", "reasoning_parser": "reasoning_parser", "tool_call_parser": "tool_parser"}
"""Setting of the router's entry of a model for a refused argument. `tandem up`, which starts both, sets it."""
NAMES = frozenset((*PASSED, *MAPPED, *KEPT, *REASONS))
"""All arguments."""
WITHOUT_FLAG = frozenset(
    (
        "model_tag",
        "model_weights",
        "mamba_config",
        "enable_mm_processor_stats",
        "_api_process_count",
        "_api_process_rank",
    )
)
"""Arguments that no flag sets."""
OTHER_SPELLINGS = {
    "-h": "help",
    "-q": "quantization",
    "-n": "nnodes",
    "-r": "node_rank",
    "-asc": "api_server_count",
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-ep": "enable_expert_parallel",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "--device-memory-utilization": "gpu_memory_utilization",
    "-sc": "speculative_config",
    "-dc": "diffusion_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
}
"""Spellings of flags that are not made of the argument's name."""
FLAGS = {f"--{name.replace('_', '-')}": name for name in NAMES - WITHOUT_FLAG} | OTHER_SPELLINGS
"""Argument of each flag; `--no-` before a name turns it off, as do `--disable-` for `--enable-`, and the reverse."""

_OPTIMIZATION = "-O"
"""Spelling of --optimization-level, which vLLM reads before its parser does: also as -O3."""
_NEGATION = re.compile("--(no|disable|enable)[-_]")
_OPPOSITES = {"no": "", "disable": "enable-", "enable": "disable-"}
"""Beginning of the flag that a negation turns off; vLLM 0.33 has the last two."""
_DTYPES = {"half": "float16", "float": "float32"}
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt]?)", re.IGNORECASE)
_POWERS = "kmgt"


class Flag(NamedTuple):
    """A flag as it was written."""

    written: str
    """The flag without its value, for errors."""
    name: str
    """Argument of vLLM."""
    values: tuple[str, ...]
    is_off: bool
    """Whether `--no-` stands before it."""
    words: tuple[str, ...]
    """The flag and its values, for vLLM's parser."""

    @property
    def key(self) -> str:
        """The flag as written, with the field that follows a dot."""
        return self.words[0].partition("=")[0]


def with_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a vLLM worker's settings with the mapped flags of `vllm_args` as settings of their own.

    `vllm_args` keeps the flags that are for vLLM's parser, `vllm_options` the arguments that are passed. Raises
    EngineStartError for a flag or an option that is refused or unknown, and for a flag that contradicts a setting.
    """
    settings = dict(values)
    if isinstance(options := settings.get("vllm_options"), Mapping):
        settings["vllm_options"] = {name: value for name, value in options.items() if _is_passed(str(name), value)}
    if not isinstance(text := settings.get("vllm_args"), str):
        return settings
    passed: list[str] = []
    mapped: dict[str, Flag] = {}
    for flag in flags_of(text):
        if flag.name in MAPPED:
            mapped[flag.name] = flag
        elif reason := _fault(flag.name, " ".join(flag.words) if flag.name in PASSED else _told(flag)):
            raise EngineStartError("vllm_args", f"{flag.written}: {reason}")
        elif flag.name in PASSED:
            passed += flag.words
    for name, flag in sorted(mapped.items(), reverse=True):  # numbers of ranks first, which kv_memory_mib needs
        setting = MAPPED[name]
        value = _mapped(flag, [settings.get(each, 1) for each in ("tensor_parallel", "pipeline_parallel")])
        if str(settings.get(setting, value)) != str(value):
            both = f"{flag.written} {' '.join(flag.values)} and {setting}: {settings[setting]}"
            raise EngineStartError("vllm_args", f"{both} differ: set one of them")
        settings[setting] = value
    return settings | {"vllm_args": shlex.join(passed)}


def flags_of(text: str) -> Iterator[Flag]:
    """Yield the flags of a command line.

    Raises EngineStartError for an unknown flag, and for words that are no flag's value.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise EngineStartError("vllm_args", f"{error}: quote values as in a shell") from None
    if words and not _is_flag(words[0]):
        raise EngineStartError(
            "vllm_args", f"{words[0]!r} comes before the first flag: name the model in the setting `model`"
        )
    starts = [number for number, word in enumerate(words) if _is_flag(word)]
    for start, end in zip(starts, [*starts, len(words)][1:], strict=True):
        yield _flag(words[start], words[start + 1 : end])


def without_router_flags(text: str) -> tuple[str, dict[str, str]]:
    """Return a command line without the flags that are the router's, and its settings of the model by them.

    `--enable-auto-tool-choice` is what a router always does. Raises EngineStartError.
    """
    kept: list[str] = []
    settings: dict[str, str] = {}
    for flag in flags_of(text):
        if flag.name in OF_ROUTER:
            if flag.is_off or len(flag.values) != 1:
                raise EngineStartError("vllm_args", f"{flag.written}: one value must follow, not {len(flag.values)}")
            settings[OF_ROUTER[flag.name]] = flag.values[0]
        elif flag.name != "enable_auto_tool_choice" or flag.is_off:
            kept += flag.words
    return shlex.join(kept), settings


def only(text: str, names: Iterable[str]) -> str:
    """Return a command line with only the flags of these arguments. Raises EngineStartError."""
    return shlex.join(word for flag in flags_of(text) if flag.name in names for word in flag.words)


def value_of(text: str, name: str) -> str | None:
    """Return the first value of a passed argument in validated `vllm_args`; None where it is not there."""
    flags = [flag for flag in flags_of(text) if flag.name == name]
    return (*flags[-1].values, "")[0] if flags else None


def count_of(text: str) -> int | None:
    """Return a number as vLLM reads it, such as 8192, 8k (8,000) or 8K (8,192); None for another text."""
    if (parts := _COUNT.fullmatch(text)) is None:
        return None
    number, unit = parts.groups()
    power = _POWERS.index(unit.lower()) + 1 if unit else 0
    if unit == unit.lower() and unit:
        return int(float(number) * 1000**power)
    return int(number) * 1024**power if number.isdecimal() else None


def _is_flag(word: str) -> bool:
    """Return whether a word begins a flag; a negative number does not."""
    return re.match(r"--|-[A-Za-z]", word) is not None


def _flag(word: str, values: list[str]) -> Flag:
    key, equals, value = word.partition("=")
    base, dot, _ = key.partition(".")
    name, is_off, attached = _argument(base), False, ""
    if name is None and (negated := _NEGATION.match(base)) is not None:
        name = _argument(f"--{_OPPOSITES[negated[1]]}{base[negated.end() :]}")
        is_off = name is not None
    if name is None and (short := _argument(word[:2])) is not None:  # as -q and its value in one word
        name, base, dot, attached = short, word[:2], "", word[2:].removeprefix("=")
    if name is None:
        near = get_close_matches(_dashed(base), FLAGS, n=1, cutoff=0.6)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise EngineStartError("vllm_args", f"{base}: vLLM has no such flag{meant}")
    arguments = ([attached] if attached else [value] if equals else []) + values
    if dot and not arguments:
        raise EngineStartError("vllm_args", f"{key}: a value must follow")
    return Flag(base, name, tuple(arguments), is_off, (word, *values))


def _argument(flag: str) -> str | None:
    if flag == _OPTIMIZATION:
        return "optimization_level"
    return FLAGS.get(_dashed(flag))


def _dashed(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _told(flag: Flag) -> str:
    return " ".join(flag.values) or ("false" if flag.is_off else "true")


def _fault(name: str, value: object) -> str:
    """Return why an argument may not have this value, or why it is refused; empty: it may."""
    if name in PASSED:
        hides = name == "structured_outputs_config" and "reasoning" in str(value)
        return REASONS["reasoning_parser"] if hides else ""
    if name not in KEPT:
        return REASONS[name]
    values, reason = KEPT[name]
    return "" if str(value).lower() in values else f"only {' or '.join(values)} is possible: {reason}"


def _is_passed(name: str, value: object) -> bool:
    """Return whether an option is for vLLM; a kept one with Tandem's value is not.

    Raises EngineStartError.
    """
    if name in MAPPED:
        raise EngineStartError("vllm_options", f"{name} is set by Tandem: set {MAPPED[name]}")
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise EngineStartError("vllm_options", f"{name}: vLLM has no such argument{meant}")
    if reason := _fault(name, value):
        raise EngineStartError("vllm_options", f"{name}: {reason}")
    return name in PASSED


def _mapped(flag: Flag, sizes: Iterable[object]) -> int | str:
    """Return the setting's value of a mapped flag, of a worker whose ranks are the product of `sizes`.

    Raises EngineStartError.
    """
    if flag.is_off or len(flag.values) != 1:
        raise EngineStartError("vllm_args", f"{flag.written}: one value must follow, not {len(flag.values)}")
    (text,) = flag.values
    if flag.name in ("dtype", "model", "master_addr", "data_parallel_address"):
        return _DTYPES.get(text, text)
    if (count := count_of(text)) is None:
        raise EngineStartError("vllm_args", f"{flag.written}: {text!r} is not a number")
    if flag.name != "kv_cache_memory_bytes":
        return count
    for size in sizes:
        count *= int(str(size) if str(size).isdecimal() else 1)  # other values are refused as settings
    return count >> 20
