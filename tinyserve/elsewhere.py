"""Flags of vLLM and of other servers that are none of ours, and what whoever writes one is told.

    -tp 2             --tensor-parallel-size is an option of vLLM that tinyserve does not have yet: leave it out, or ...
    -tp 1             is what happens anyway, and is taken
    --ctx-size 4096   unknown option --ctx-size: say --max-model-len.
    --max-modle-len   unknown option --max-modle-len: did you mean --max-model-len?

None is ignored: a command line that asks for something else than it gets should not start. One that asks for what it
gets anyway should: scripts write down defaults, and one device is a size too.

Before: options.py.  After: config.py, which knows our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .options import FALSE, TRUE, nearest

_SWITCHES = """\
    cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb disable_fastapi_docs
    disable_sliding_window enable_dbo enable_elastic_ep enable_eplb enable_expert_parallel
    enable_logging_iteration_details enable_lora_bias enable_mfu_metrics enable_mm_embeds enable_prompt_adapter
    enable_prompt_embeds enable_return_routed_experts enable_scale_out enable_sleep_mode
    enable_tokenizer_info_endpoint fully_sharded_loras grpc headless interleave_mm_strings kv_cache_metrics
    kv_sharing_fast_prefill language_model_only mm_encoder_only ray_workers_use_nsight skip_mm_profiling
    skip_tokenizer_init tokens_only trust_request_mm_kwargs worker_use_ray"""
_OTHERS = """\
    additional_config all2all_backend allowed_local_media_path allowed_media_domains api_server_count
    attention_backend attention_config code_revision config_format convert cpu_offload_gb
    custom_histogram_buckets data_parallel_address data_parallel_backend data_parallel_rank
    data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold decode_context_parallel_size default_mm_loras
    distributed_executor_backend ec_transfer_config eplb_config expert_placement_strategy guided_decoding_backend
    ignore_patterns io_processor_plugin kernel_config kv_cache_dtype_skip_layers kv_cache_metrics_sample
    kv_events_config kv_offloading_backend kv_offloading_size kv_transfer_config limit_mm_per_prompt
    linear_backend log_config_file logits_processor_pattern logits_processors lora_dtype lora_target_modules
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype master_addr master_port
    max_long_partial_prefills max_num_partial_prefills media_io_kwargs middleware mm_encoder_tp_mode
    mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs model_impl model_loader_extra_config
    moe_backend nnodes node_rank num_lookahead_slots num_scheduler_steps num_speculative_tokens offload_backend
    offload_group_size override_pooler_config performance_mode pipeline_parallel_size
    pooler_config preemption_mode prefill_context_parallel_size prefix_caching_hash_algo profiler_config
    reasoning_config runner safetensors_load_strategy scheduler_delay_factor spec_method spec_model spec_tokens
    speculative_config speculative_model structured_outputs_config swap_space task tensor_parallel_size
    tokenizer_mode tokenizer_pool_size tokenizer_revision tool_server video_pruning_rate weight_transfer_config"""
SHORT = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-ep": "enable_expert_parallel", "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size",
    "-sc": "speculative_config", "-cc": "compilation_config", "-ac": "attention_config", "-O": "optimization_level",
}  # fmt: skip
# Of vLLM, and would change what is served: refused by name, not guessed at, but for the values below.
NOT_YET = frozenset([*_SWITCHES.split(), *_OTHERS.split()])
# Values with which an option of vLLM asks for what happens anyway: its default, mostly. So do null, an empty value, and
# false where it is a switch that is not there.
_SAME = """\
    all2all_backend allgather_reducescatter naive
    aggregate_engine_logging true false
    api_server_count 1
    attention_backend auto triton_attn
    calculate_kv_scales false
    config_format auto hf
    convert auto none
    cpu_offload_gb 0
    data_parallel_backend mp
    data_parallel_rank 0
    data_parallel_rpc_port 29550
    data_parallel_size 1
    data_parallel_size_local 1
    data_parallel_start_rank 0
    dbo_decode_token_threshold 32
    dbo_prefill_token_threshold 512
    decode_context_parallel_size 1
    disable_access_log_for_endpoints *
    disable_async_output_proc false
    disable_cascade_attn true false
    disable_chunked_mm_input true false
    disable_custom_all_reduce true false
    disable_frontend_multiprocessing true false
    disable_hybrid_kv_cache_manager false
    disable_log_requests true
    disable_uvicorn_access_log true
    distributed_executor_backend uni mp
    enable_layerwise_nvtx_tracing false
    enable_log_deltas true false
    enable_log_outputs false
    enable_offline_docs true
    enable_per_request_metrics false
    enable_reasoning true
    enable_server_load_tracking true false
    enable_ssl_refresh true
    expert_placement_strategy linear
    guided_decoding_backend auto guidance
    ignore_patterns original/**/*
    kv_cache_metrics_sample 0.01
    kv_offloading_backend native
    kv_offloading_size 0
    language_model_only true
    limit_mm_per_prompt.audio 0
    limit_mm_per_prompt.image 0
    limit_mm_per_prompt.video 0
    linear_backend auto triton
    lora_dtype auto
    mamba_cache_dtype auto
    mamba_cache_mode none
    mamba_ssm_cache_dtype auto
    master_addr 127.0.0.1
    master_port 29501
    max_long_partial_prefills 1
    max_num_partial_prefills 1
    max_parallel_loading_workers 1
    mm_encoder_tp_mode weights
    mm_processor_cache_gb 0 4
    mm_processor_cache_type lru
    model_impl auto
    moe_backend auto triton
    nnodes 1
    node_rank 0
    num_lookahead_slots 0
    num_scheduler_steps 1
    num_speculative_tokens 0
    offload_backend auto
    offload_group_size 0
    optimization_level 1 2 3
    performance_mode balanced
    pipeline_parallel_size 1
    preemption_mode recompute
    prefill_context_parallel_size 1
    prefix_caching_hash_algo sha256
    response_role assistant
    runner auto generate
    safetensors_load_strategy lazy auto
    scheduler_delay_factor 0
    skip_mm_profiling true
    spec_tokens 0
    structured_outputs_config.backend auto guidance
    structured_outputs_config.disable_additional_properties false
    structured_outputs_config.disable_any_whitespace false
    swap_space 0
    task auto generate
    tensor_parallel_size 1
    tokenizer_mode auto hf
    tokenizer_pool_size 0
    trust_remote_code false
    use_v2_block_manager true
    uvicorn_log_level info
    verbose false
    video_pruning_rate 0
    worker_cls auto"""
SAME = {name: tuple(values) for name, *values in map(str.split, _SAME.splitlines())}
# Flags for which another of ours stands, or none is needed.
INSTEAD = {
    "aggregate_engine_logging": "not needed: there is one engine.",
    "async_scheduling": "say --depth 2 (the default on a GPU), or --depth 1 for no.",
    "calculate_kv_scales": "not needed: int8 has a scale for each token; those of fp8 come from the checkpoint.",
    "collect_detailed_traces": "not needed: spans hold the times of a request; /dashboard/trace has each step.",
    "compilation_config": "say --cudagraph-capture-sizes or --enforce-eager; nothing else is compiled ahead.",
    "disable_access_log_for_endpoints": "not needed: there is no such log.",
    "disable_async_output_proc": "--depth 1 has one step in flight.",
    "disable_cascade_attn": "not needed: there is no such attention.",
    "disable_chunked_mm_input": "not needed: no model here takes media yet.",
    "disable_custom_all_reduce": "not needed: a model runs on one device.",
    "disable_frontend_multiprocessing": "not needed: there is one process.",
    "disable_hybrid_kv_cache_manager": "there is one manager, for layers of all kinds.",
    "disable_log_requests": "requests are logged with --enable-log-requests, and not without.",
    "disable_uvicorn_access_log": "not needed: there is no such log.",
    "enable_layerwise_nvtx_tracing": "/dashboard/trace has each step.",
    "enable_log_deltas": "answers are never logged.",
    "enable_log_outputs": "answers are never logged.",
    "enable_offline_docs": "not needed: /docs always works offline.",
    "enable_per_request_metrics": "not needed: spans (--otlp-traces-endpoint) hold the times of a request.",
    "enable_reasoning": "not needed: thoughts are told from the chat template; --reasoning-parser says otherwise.",
    "enable_server_load_tracking": "not needed: /load is always there.",
    "h11_max_header_count": "not needed: a request may have 256 headers.",
    "h11_max_incomplete_event_size": "not needed: headers may have 64 KB; --max-body-bytes is for bodies.",
    "hf_token": "set HF_TOKEN in the environment, which no list of processes shows.",
    "hf_config_path": "say --hf-overrides for what differs.",
    "max_new_tokens": "each request says max_tokens; for all, --override-generation-config.max_new_tokens.",
    "max_context_len_to_capture": "say --cudagraph-capture-sizes: batch sizes that get a device graph.",
    "max_cudagraph_capture_size": "say --cudagraph-capture-sizes: batch sizes that get a device graph.",
    "max_parallel_loading_workers": "not needed: weights are read front to back, one tensor at a time.",
    "max_tokens": "each request says it; for all, --override-generation-config.max_new_tokens.",
    "max_seq_len_to_capture": "say --cudagraph-capture-sizes: batch sizes that get a device graph.",
    "optimization_level": "say --enforce-eager for 0; all else that is built is always on.",
    "reasoning_parser_plugin": "say --reasoning-parser module:NAME.",
    "response_role": "answers have the role assistant, which is what clients look for.",
    "rope_scaling": "say --hf-overrides '{\"rope_scaling\": {...}}'.",
    "rope_theta": "say --hf-overrides.rope_theta.",
    "scheduler_cls": "there is one scheduler; it is a few hundred lines to change (tinyserve/scheduling).",
    "show_hidden_metrics_for_version": "not needed: no metric is hidden.",
    "ssl_ciphers": "Python's own list is used.",
    "ssl_cert_reqs": "not needed: with --ssl-ca-certs clients must have a certificate.",
    "enable_ssl_refresh": "not needed: a new certificate is always taken without a restart.",
    "tool_parser_plugin": "say --tool-call-parser module:NAME.",
    "tool_strict_level": "each tool says strict.",
    "temperature": "each request says it; for all, --override-generation-config.temperature.",
    "trust_remote_code": "no code of a checkpoint is ever run; families that are built need none.",
    "use_v2_block_manager": "there is one manager of blocks.",
    "uvicorn_log_level": "say --log-level.",
    "verbose": "say --log-level debug.",
    "worker_cls": "there are no workers; the runner is tinyserve/runner.",
    "worker_extension_cls": "there are no workers; the runner is tinyserve/runner.",
}
# What other servers (llama.cpp, SGLang, TGI, TensorRT-LLM) call what is an option here.
CALLED = {
    "alias": "served_model_name", "batch_size": "max_num_seqs", "chat_template_file": "chat_template",
    "chunked_prefill_size": "max_num_batched_tokens", "context_length": "max_model_len",
    "context_window": "max_model_len", "ctx_size": "max_model_len", "hostname": "host", "lora": "lora_modules",
    "lora_paths": "lora_modules", "max_batch_size": "max_num_seqs", "max_concurrent_requests": "max_num_seqs",
    "max_input_length": "max_model_len", "max_length": "max_model_len", "max_running_requests": "max_num_seqs",
    "max_seq_len": "max_model_len", "max_total_tokens": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization", "model_dir": "model", "model_id": "model", "model_path": "model",
    "n_ctx": "max_model_len", "parallel": "max_num_seqs", "quantize": "quantization", "threads": "cpu_threads",
    "tokenizer_path": "tokenizer", "tp": "tensor_parallel_size", "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size", "pp_size": "pipeline_parallel_size", "dp": "data_parallel_size",
    "dp_size": "data_parallel_size", "cuda_graph_sizes": "cudagraph_capture_sizes",
}  # fmt: skip


def name_elsewhere(word: str) -> str | None:
    """The name of the option of vLLM that a word of the command line is (-tp, --tp-size, --no-enable-eplb), or None."""
    word, *path = word.split(".")
    name = SHORT.get(word) or (word[2:].replace("-", "_") if word.startswith("--") else word)
    name = name.removeprefix("no_")
    name = CALLED.get(name, name)
    return ".".join([name, *path]) if name in NOT_YET or name in INSTEAD else None


def is_switch(name: str) -> bool:
    """Whether an option of vLLM is given without a value."""
    return name in _SWITCHES.split() or not {"true", "false"}.isdisjoint(SAME.get(name, ()))


def asks_nothing(name: str, value: Any) -> bool:
    """Whether an option of vLLM (its name, perhaps with a key behind a dot) asks for what happens anyway."""
    if name.partition(".")[0] not in NOT_YET and name not in INSTEAD:
        return False
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    if isinstance(value, Mapping):
        return all(asks_nothing(f"{name}.{key}", inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(asks_nothing(name, inner) for inner in value)
    text, accepted = _plain(value), SAME.get(name, ())
    if text in ("null", "none", "~", "") or "*" in accepted:
        return True
    if is_switch(name):
        text = {"1": "true", "0": "false"}.get(text, text)
        return text in accepted or (text == "false" and name in NOT_YET)
    return text in accepted


def _plain(value: Any) -> str:
    """A value as the table writes it."""
    text = ("true" if value else "false") if isinstance(value, bool) else "null" if value is None else str(value)
    text = text.strip().lower()
    if text in (*TRUE, *FALSE) and not text.isdigit():
        return "true" if text in TRUE else "false"
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def answer_to(name: str, known: Sequence[str]) -> str:
    """What to tell whoever wrote an option that does not exist. known: names of those that do."""
    long = SHORT.get(name)
    short = not long and name.startswith("-") and not name.startswith("--")
    plain = long or name.lstrip("-").replace("-", "_")
    shown = name if short else _flag(plain)
    bare = plain.removeprefix("no_").partition(".")[0]
    if bare in INSTEAD:
        cured = INSTEAD[bare].startswith(("say ", "set ")) or "--" in INSTEAD[bare]
        return f"{shown}: {INSTEAD[bare]}" + ("" if cured else " Leave it out.")
    if bare in NOT_YET:
        return f"{shown} {_not_yet(plain if plain in SAME else bare)}"
    if CALLED.get(bare) in NOT_YET:
        return f"unknown option {shown}: {_flag(CALLED[bare])} {_not_yet(CALLED[bare])}"
    if bare in CALLED:
        return f"unknown option {shown}: say {_flag(CALLED[bare])}."
    close = nearest(bare, [*known, *NOT_YET])
    return f"unknown option {shown}" + (f": did you mean {_flag(close)}?" if close else ". See --help.")


def _not_yet(name: str) -> str:
    values = [] if is_switch(name) else SAME.get(name, ())
    or_say = f", or say {' or '.join(values)}" if values else ""
    return f"is an option of vLLM that tinyserve does not have yet: leave it out{or_say}."


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
