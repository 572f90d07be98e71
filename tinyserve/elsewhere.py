"""Flags of vLLM and of other servers that are none of ours, and what whoever writes one is told.

    -tp 2             --tensor-parallel-size is an option of vLLM that tinyserve does not have yet.
    --ctx-size 4096   unknown option --ctx-size: say --max-model-len.
    --max-modle-len   unknown option --max-modle-len: did you mean --max-model-len?

None is ignored: a command line that asks for something else than it gets should not start.

Before: options.py.  After: config.py, which knows our own.
"""

from __future__ import annotations

from collections.abc import Sequence

from .options import nearest

_OTHERS = """\
    additional_config all2all_backend allowed_local_media_path allowed_media_domains api_server_count
    attention_backend attention_config code_revision config_format convert cpu_offload_gb cudagraph_metrics
    custom_histogram_buckets data_parallel_size_local dbo_decode_token_threshold dbo_prefill_token_threshold
    default_mm_loras disable_fastapi_docs disable_sliding_window distributed_executor_backend ec_transfer_config
    enable_dbo enable_elastic_ep enable_eplb enable_logging_iteration_details enable_mfu_metrics enable_mm_embeds
    enable_prompt_embeds enable_scale_out enable_sleep_mode enable_tokenizer_info_endpoint eplb_config
    expert_placement_strategy fully_sharded_loras grpc guided_decoding_backend headless hf_token ignore_patterns
    interleave_mm_strings io_processor_plugin kernel_config kv_cache_dtype_skip_layers kv_cache_metrics
    kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill
    kv_transfer_config language_model_only limit_mm_per_prompt linear_backend logits_processors lora_dtype
    lora_target_modules mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype master_addr
    master_port max_cudagraph_capture_size media_io_kwargs middleware mm_encoder_only mm_encoder_tp_mode
    mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs model_impl model_loader_extra_config
    moe_backend nnodes node_rank offload_backend offload_group_size performance_mode pooler_config
    prefix_caching_hash_algo profiler_config reasoning_config runner safetensors_load_strategy skip_mm_profiling
    skip_tokenizer_init spec_method spec_model spec_tokens structured_outputs_config swap_space task tokenizer_mode
    tokenizer_revision tokens_only tool_server trust_request_mm_kwargs video_pruning_rate weight_transfer_config"""
# Of vLLM, and would change what is served: refused by name, not guessed at. With the short spelling, or None.
NOT_YET = {
    "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep", "decode_context_parallel_size": "-dcp", "speculative_config": "-sc",
    "compilation_config": "-cc", "optimization_level": "-O",
} | dict.fromkeys(_OTHERS.split())  # fmt: skip
# Flags for which another of ours stands, or none is needed.
INSTEAD = {
    "aggregate_engine_logging": "not needed: there is one engine.",
    "async_scheduling": "say --depth 2 (the default on a GPU), or --depth 1 for no.",
    "calculate_kv_scales": "not needed: int8 has a scale for each token; those of fp8 come from the checkpoint.",
    "collect_detailed_traces": "not needed: spans hold the times of a request; /dashboard/trace has each step.",
    "disable_access_log_for_endpoints": "not needed: there is no such log.",
    "disable_chunked_mm_input": "not needed: no model here takes media yet.",
    "disable_custom_all_reduce": "not needed: a model runs on one device.",
    "disable_hybrid_kv_cache_manager": "there is one manager, for layers of all kinds.",
    "disable_log_requests": "not needed: requests are logged only with --enable-log-requests.",
    "disable_uvicorn_access_log": "not needed: there is no such log.",
    "enable_layerwise_nvtx_tracing": "/dashboard/trace has each step.",
    "enable_log_deltas": "answers are never logged.",
    "enable_log_outputs": "answers are never logged.",
    "enable_per_request_metrics": "not needed: spans (--otlp-traces-endpoint) hold the times of a request.",
    "enable_reasoning": "not needed: thoughts are told from the chat template; --reasoning-parser says otherwise.",
    "enable_server_load_tracking": "not needed: /load is always there.",
    "hf_config_path": "say --hf-overrides for what differs.",
    "max_new_tokens": "each request says max_tokens; for all, --override-generation-config.max_new_tokens.",
    "max_parallel_loading_workers": "not needed: weights are read front to back, one tensor at a time.",
    "max_tokens": "each request says it; for all, --override-generation-config.max_new_tokens.",
    "reasoning_parser_plugin": "say --reasoning-parser module:NAME.",
    "response_role": "answers have the role assistant, which is what clients look for.",
    "scheduler_cls": "there is one scheduler; it is a few hundred lines to change (tinyserve/scheduling).",
    "show_hidden_metrics_for_version": "not needed: no metric is hidden.",
    "ssl_ciphers": "Python's own list is used.",
    "ssl_cert_reqs": "not needed: with --ssl-ca-certs clients must have a certificate.",
    "enable_ssl_refresh": "not needed: a new certificate is always taken without a restart.",
    "tool_parser_plugin": "say --tool-call-parser module:NAME.",
    "tool_strict_level": "each tool says strict.",
    "temperature": "each request says it; for all, --override-generation-config.temperature.",
    "trust_remote_code": "no code of a checkpoint is ever run; families that are built need none.",
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
}  # fmt: skip


def answer_to(name: str, known: Sequence[str]) -> str:
    """What to tell whoever wrote an option that does not exist. known: names of those that do."""
    long = next((long for long, letters in NOT_YET.items() if letters == name), None)
    short = not long and name.startswith("-") and not name.startswith("--")
    plain = long or name.lstrip("-").replace("-", "_")
    shown = name if short else _flag(plain)
    bare = plain.removeprefix("no_")
    if bare in INSTEAD:
        return f"{shown}: {INSTEAD[bare]}"
    if bare in NOT_YET:
        return f"{shown} is an option of vLLM that tinyserve does not have yet."
    if CALLED.get(bare) in NOT_YET:
        return f"unknown option {shown}: {_flag(CALLED[bare])} is an option of vLLM that tinyserve does not have yet."
    if bare in CALLED:
        return f"unknown option {shown}: say {_flag(CALLED[bare])}."
    close = nearest(bare, [*known, *NOT_YET])
    return f"unknown option {shown}" + (f": did you mean {_flag(close)}?" if close else ". See --help.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
