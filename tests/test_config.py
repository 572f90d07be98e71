"""Options: one declaration, four ways to set it, and errors that say what would be right."""

import pytest

from tinyserve import config, elsewhere
from tinyserve.errors import ConfigError
from tinyserve.options import parse_size


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("2m", 2_000_000), ("1M", 2**20), ("1.5k", 1500), ("2GiB", 2**31),
     ("2GB", 2 * 10**9), ("1g", 10**9), ("1T", 2**40), ("-5", -5), ("1_000", 1000), (" 3 kib ", 3072)],
)  # fmt: skip
def test_human_sizes(text, number):
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["", "k", "4kk", "1.5", "0.3k5", "four", "1e3", "0x10"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="whole number"):
        parse_size(text)


def test_text_and_native_values_give_the_same_option():
    texts = config.build(
        {"max_num_seqs": "1k", "enable_prefix_caching": "no", "served_model_name": "a, b", "watermark": "0.5"}
    )
    natives = config.build(
        {"max_num_seqs": 1000, "enable_prefix_caching": False, "served_model_name": ["a", "b"], "watermark": 0.5}
    )

    assert texts == natives


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_modle_len": 1}, "did you mean --max-model-len"),
        ({"tensor_parallel_size": 2}, "does not have yet: leave it out, or say 1"),
        ({"tensor_paralel_size": 2}, "did you mean --tensor-parallel-size"),
        ({"qqqqqqqqq": 1}, "unknown option"),
        ({"dtype": "bfloat1"}, "Did you mean 'bfloat16'"),
        ({"port": 70000}, "--port: must be at most 65535"),
        ({"port": True}, "--port"),
        ({"gpu_memory_utilization": 0}, "--gpu-memory-utilization: must be above 0"),
        ({"gpu_memory_utilization": "nan"}, "finite"),
        ({"model": None}, "--model: a value is needed"),
        ({"hf_overrides": "[1]"}, "--hf-overrides"),
        ({"enable_prefix_caching": "maybe"}, "true or false"),
        ({"async_scheduling": True}, "--depth 2"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "max_model_len": 9},
            "at least --max-model-len",
        ),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "at least --max-num-seqs"),
        ({"ssl_keyfile": "k"}, "needed together"),
        ({"allow_credentials": True, "allowed_origins": ["*"]}, "named --allowed-origins"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 4}, "power of two"),
        ({"quantization": "hqq"}, "not built; it may be"),
        ({"api_key": ["k", ""]}, "--api-key is empty"),
        ({"api_key": [" "]}, "--api-key is empty"),
        ({"model": ""}, "--model: is empty"),
        ({"host": " "}, "--host: is empty"),  # it listened on every address
        ({"uds": ""}, "--uds: is empty"),
        ({"host": "127.0.0.1:8000"}, "--host: must be a name or an address without scheme and port"),
        ({"host": "[::1]"}, "without scheme"),
        ({"host": "http://localhost"}, "without scheme"),
        ({"hf_overrides": {1: 2}}, "--hf-overrides: must have names as keys, got 1"),
        ({"metrics_prefix": "a b"}, "--metrics-prefix: must be letters"),
        ({"root_path": "//evil.example.org"}, "such as /api"),
        ({"allowed_hosts": "http://a/"}, "without scheme"),
        ({"allowed_origins": "example.org"}, "https://example.org"),
        ({"otlp_traces_endpoint": "collector:4318"}, "begin with http"),
        ({"revision": "a\0b"}, "zero character"),
        ({"watermark": 10**400}, "--watermark: int too large"),
        ({"port": 10**5000}, "--port: must be at most 65535, got an integer of 16610 bits"),
        ({"max_body_bytes": "9" * 5000}, "--max-body-bytes: has 5000 characters"),
        ({"max_num_queued_tokens": 2**63}, "--max-num-queued-tokens: must be at most 9223372036854775807"),
        ({"hf_overrides": "[" * 100_000}, "--hf-overrides: brackets"),
        ({"served_model_name": "[" * 100_000}, "--served-model-name: brackets"),
        ({"served_model_name": '["a'}, "a JSON list, but is none"),
        ({"served_model_name": {"a": 1}}, "--served-model-name: must be a list"),  # it was called a
        ({"lora_modules": 1.5j}, "--lora-modules: must be a list"),
    ],
)
def test_wrong_options_are_refused_with_a_cure(values, message):
    with pytest.raises(ConfigError, match=message):
        config.build(values)


@pytest.mark.parametrize("key", ["[s3cret", "s3cret\n2", ["s3cret", {"s3cret": 1}], "s3crét"])
def test_a_wrong_key_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="--api-key: must be printable ASCII") as caught:
        config.build({"api_key": key})
    assert "s3c" not in str(caught.value)


def test_a_large_value_is_told_in_a_line():
    """An alias of YAML makes 2**40 elements of 40 lines; none of them is written out."""
    bomb = []
    for _ in range(40):
        bomb = [bomb, bomb]
    for flag in config.flags():
        with pytest.raises(ConfigError) as caught:
            flag.convert({"x": bomb} if flag.type is not dict else bomb)
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [
    {"tensor_parallel_size": 1, "pipeline_parallel_size": "1", "data-parallel-size": 1.0},
    {"enable_expert_parallel": False},
    {"swap_space": 0, "cpu_offload_gb": "0", "num_scheduler_steps": 1, "enable_dbo": "no", "enable_eplb": 0},
    {"speculative_config": None, "kv_transfer_config": {}, "middleware": [], "logits_processors": "null"},
    {"limit_mm_per_prompt": {"image": 0, "video": 0}, "structured_outputs_config": '{"backend": "auto"}'},
    {"disable_log_requests": True, "enable_reasoning": "true", "trust_remote_code": False, "task": "generate"},
    {"worker_cls": "auto", "scheduler_cls": None, "language_model_only": True, "nnodes": 1, "node_rank": 0},
])  # fmt: skip
def test_what_happens_anyway_may_be_asked_for(values):
    """Scripts write down defaults: `tensor_parallel_size=1` was refused."""
    assert config.build(values) == config.build({})


@pytest.mark.parametrize(("name", "value", "cure"), [
    ("tensor_parallel_size", 2, "leave it out, or say 1."), ("enable_expert_parallel", True, "leave it out."),
    ("swap_space", 4, "or say 0."), ("limit_mm_per_prompt", {"image": 1}, "leave it out"),
    ("kv_transfer_config", {"kv_role": "both"}, "leave it out"), ("kv_transfer_config", "{", "leave it out"),
    ("disable_log_requests", False, "--enable-log-requests"), ("trust_remote_code", True, "Leave it out."),
    ("disable_hybrid_kv_cache_manager", True, "one manager"), ("tensor_parallel_size", True, "or say 1."),
    ("structured_outputs_config", {"backend": "xgrammar"}, "leave it out"), ("runner", "pooling", "or say auto or gen"),
])  # fmt: skip
def test_what_does_not_happen_is_refused(name, value, cure):
    with pytest.raises(ConfigError, match=cure):
        config.build({name: value})


def test_the_table_of_harmless_values_is_of_options_that_are_refused_otherwise():
    for name in elsewhere.SAME:
        assert name.partition(".")[0] in elsewhere.NOT_YET or name in elsewhere.INSTEAD, name
        assert all(elsewhere.asks_nothing(name, value) for value in elsewhere.SAME[name] if value != "*"), name
        assert "*" in elsewhere.SAME[name] or not elsewhere.asks_nothing(name, "some-other-value"), name
    assert set(elsewhere.SHORT.values()) <= {*elsewhere.NOT_YET, *elsewhere.INSTEAD}


def test_an_empty_variable_is_none(monkeypatch):
    """As compose files and scripts leave them: TINYSERVE_HOST= listened on every address."""
    monkeypatch.setenv("TINYSERVE_HOST", "")
    monkeypatch.setenv("TINYSERVE_NO_SUCH_THING", " ")

    assert config.environment_values() == ({}, [])


@pytest.mark.parametrize(("text", "key"), [("a,b", "a"), ('["a,b", "c"]', "a,b"), ("", None), (" ", None)])
def test_clients_read_keys_as_the_server_does(monkeypatch, text, key):
    monkeypatch.setenv("TINYSERVE_API_KEY", text)
    assert config.client_api_key() == key


@pytest.mark.parametrize(
    "host", ["::", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "0.0.0.0", "localhost", "a-b.example.org"]
)
def test_addresses_of_all_kinds(host):
    assert config.build({"host": host}).server.host == host


def test_the_context_may_be_automatic():
    assert config.build({"max_model_len": "auto"}).model.max_model_len == -1
    assert config.build({"max_model_len": -1}).model.max_model_len == -1
    assert config.build({}).model.max_model_len is None


def test_resolving_fills_every_number_that_depends_on_the_device():
    """Depth 1 on the CPU and 2 on a GPU; an H200 (>= 70 GiB) gets 8192 tokens and 1024 sequences a step, and 16384 when
    nobody reads along."""
    cpu = config.build({}).resolve("cpu")
    gpu = config.build({}).resolve("cuda", 141 * 1024**3)

    assert (cpu.scheduler.depth, cpu.cache.block_size) == (1, 32)
    assert (gpu.scheduler.depth, gpu.cache.block_size) == (2, 64)
    assert (gpu.scheduler.max_num_batched_tokens, gpu.scheduler.max_num_seqs) == (8192, 1024)
    assert config.build({}).resolve("cuda", 141 * 1024**3, offline=True).scheduler.max_num_batched_tokens == 16384


def test_a_long_prompt_holds_streams_on_a_cpu_for_a_quarter_of_the_time():
    """256 tokens a step there, 128 of a prompt that shares it, where 512 were; nobody waits offline or on a GPU."""

    def step(device="cpu", offline=False, **chosen):
        options = config.build(chosen).resolve(device, offline=offline).scheduler
        return options.max_num_batched_tokens, options.long_prefill_token_threshold

    assert (step(), step(offline=True)) == ((256, 128), (512, 0))
    assert step("cuda") == (2048, 0)
    assert step(max_num_batched_tokens=512) == (512, 0)
    assert step(long_prefill_token_threshold=0) == (256, 0)
    assert step(max_num_batched_tokens=512, long_prefill_token_threshold=64) == (512, 64)
    assert step(enable_chunked_prefill=False) == (512, 0)


def test_resolving_keeps_what_the_user_chose():
    chosen = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "block_size": 32, "depth": 2}
    resolved = config.build(chosen).resolve("cpu")

    assert (resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == (3, 8)
    assert (resolved.cache.block_size, resolved.scheduler.depth) == (32, 2)
    assert config.build({"max_num_batched_tokens": 8}).resolve("cpu").scheduler.max_num_seqs == 8


def test_environment_variables_are_read_by_option_name(monkeypatch):
    monkeypatch.setenv("TINYSERVE_MAX_MODEL_LEN", "4k")
    monkeypatch.setenv("TINYSERVE_MAX_MODLE_LEN", "4k")
    values, unknown = config.environment_values()

    assert values["max_model_len"] == "4k"
    assert "TINYSERVE_MAX_MODLE_LEN" in unknown


def test_a_kubernetes_service_named_tinyserve_does_not_set_the_port(monkeypatch):
    """Kubernetes writes TINYSERVE_PORT=tcp://10.0.0.1:8000 into every pod beside a service `tinyserve`."""
    monkeypatch.setenv("TINYSERVE_PORT", "tcp://10.0.0.1:8000")

    assert "port" not in config.environment_values()[0]


def test_cpu_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    config.prepare_cpu_environment()

    import os

    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("7", "passive")


def test_a_flag_for_threads_goes_before_the_environment(monkeypatch):
    """Breaks if --cpu-threads is silently ignored where OMP_NUM_THREADS is set."""
    import os

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    config.prepare_cpu_environment(3)

    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("text", "cores"), [("max 100000", 64), ("400000 100000", 4), ("150000 100000", 2), ("", 64)])
def test_a_container_gets_no_more_threads_than_its_quota(monkeypatch, tmp_path, text, cores):
    """Breaks at 63 threads in a container of 4 cores, where most of them would wait for the rest."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(config, "CPU_QUOTA", tmp_path / "cpu.max")
    config.CPU_QUOTA.write_text(text)

    assert config.usable_cores() == cores


def test_every_option_has_a_help_text_of_one_line():
    for flag in config.flags():
        assert flag.help and "\n" not in flag.help and len(flag.help) < 100, flag.name


def test_no_option_is_both_known_and_refused():
    """`runner` is refused as a flag of vLLM; it is also the name of a group here, which is no flag."""
    assert not {*elsewhere.NOT_YET, *elsewhere.INSTEAD} & {flag.name for flag in config.flags()}
    assert not set(elsewhere.NOT_YET) & set(elsewhere.INSTEAD)
    known = {flag.name for flag in config.flags()} | set(elsewhere.NOT_YET)
    assert set(elsewhere.CALLED.values()) <= known and not set(elsewhere.CALLED) & (known | set(elsewhere.INSTEAD))
    for table in (elsewhere.NOT_YET, elsewhere.INSTEAD, elsewhere.CALLED):
        for name in table:
            told = config.unknown_option("--" + name.replace("_", "-"))
            assert "did you mean" not in told and "See --help" not in told


@pytest.mark.parametrize(
    ("chosen", "folder"), [("/var/big", "/var/big"), ("", "/home/me/.cache"), ("relative", "/home/me/.cache")]
)
def test_downloads_go_where_the_user_keeps_caches(monkeypatch, chosen, folder):
    """$XDG_CACHE_HOME was not read; one that is no whole path is ignored, as its specification says."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert str(config.cache_folder()) == f"{folder}/tinyserve"
