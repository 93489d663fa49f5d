"""Flags of `vllm serve` in a worker's settings: passed, mapped to settings, or refused by name."""

import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.config import parse_overrides, to_overrides
from cluster.errors import StartError
from engine.config import WorkerConfig
from engine.vllm_flags import (
    FLAGS,
    KEPT,
    MAPPED,
    NAMES,
    OF_ROUTER,
    PASSED,
    REASONS,
    WITHOUT_FLAG,
    count_of,
    flags_of,
    with_flags,
)

PAGE = Path(__file__).parents[2] / "docs" / "vllm-flags.md"


def worker(flags: str, **settings: Any) -> WorkerConfig:
    return WorkerConfig.parse({"model": "m", "engine": "vllm", "vllm_args": flags} | settings)


def test_each_argument_is_in_one_table() -> None:
    assert len(NAMES) == len(PASSED) + len(MAPPED) + len(KEPT) + len(REASONS)


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_each_flag_is_passed_or_a_setting_or_refused_by_its_name(flag: str) -> None:
    name = FLAGS[flag]
    if name in PASSED:
        assert worker(f"{flag} 1").vllm_args == f"{flag} 1"
    elif name in MAPPED:
        value = "float32" if name == "dtype" else str(64 << 20)
        expected = with_flags({"vllm_args": f"{flag} {value}"})
        assert set(expected) == {"vllm_args", MAPPED[name]}
        assert expected["vllm_args"] == ""
    else:
        with pytest.raises(StartError) as refused:
            worker(f"--max-model-len 8 {flag}=other")
        assert refused.value.field == "vllm_args"
        assert refused.value.reason.startswith(f"{flag}: ")


@pytest.mark.parametrize("name", sorted(KEPT))
def test_a_flag_may_repeat_the_value_that_tandem_has(name: str) -> None:
    for value in KEPT[name][0]:
        flag = f"--{name.replace('_', '-')}"
        words = {"true": flag, "false": flag.replace("--", "--no-", 1)}.get(value, f"{flag} {value}")
        assert worker(words).vllm_args == ""
        assert worker("", vllm_options={name: value}).vllm_options == {}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("-tp 2", {"tensor_parallel": 2}),
        (
            "-dp 4 -dpn 3 -dpa node-0 --data-parallel-rpc-port 31000 -dpe",
            {
                "data_parallel": 4,
                "data_parallel_rank": 3,
                "data_parallel_address": "node-0",
                "data_parallel_port": 31000,
            },
        ),
        ("--tensor_parallel_size=2 -tp=4", {"tensor_parallel": 4}),
        ("--block-size 64", {"block_tokens": 64}),
        ("--max-num-batched-tokens 8k", {"max_batch_tokens": 8000}),
        ("--max-num-batched-tokens 8K", {"max_batch_tokens": 8192}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype bfloat16", {"dtype": "bfloat16"}),
        ("--kv-cache-memory-bytes 1000000000", {"kv_memory_mib": 953}),
        ("--kv-cache-memory-bytes 1G -tp 2", {"kv_memory_mib": 2048, "tensor_parallel": 2}),
        ("-pp 2 --kv-cache-memory-bytes 1G -tp 2", {"kv_memory_mib": 4096, "pipeline_parallel": 2}),
        (
            "--nnodes 2 -r 1 --master-addr 10.0.0.1 --master-port 7000 --headless",
            {"nodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 7000},
        ),
        ("", {"block_tokens": 32}),
    ],
)
def test_flags_that_are_settings(flags: str, settings: dict[str, Any]) -> None:
    config = worker(flags)
    assert config.model_dump(include=set(settings)) == settings
    assert config.vllm_args == ""


def test_kv_memory_is_that_of_all_ranks() -> None:
    assert worker("--kv-cache-memory-bytes 1G", tensor_parallel=4).kv_memory_mib == 4096


@pytest.mark.parametrize(
    "flags",
    [
        "--max-model-len -1",
        "--compilation-config.mode 0 -cc.cudagraph_mode=NONE -O3 -O 2 -qfp8",
        "--no-enforce-eager --no_disable_custom_all_reduce",
        "--disable-hc-sp --enable_sliding_window",
        """--hf-overrides '{"rope_theta": 1.5}'""",
        "--kv-cache-dtype-skip-layers 0 1 --max_num_seqs=4",
        "--device-memory-utilization 0.5",
    ],
)
def test_what_is_for_vllms_parser_reaches_it_as_it_was_written(flags: str) -> None:
    assert [flag.words for flag in flags_of(worker(flags).vllm_args)] == [flag.words for flag in flags_of(flags)]


@pytest.mark.parametrize(
    ("flags", "settings", "reason"),
    [
        ("--tensor-parallel-size 4", {"tensor_parallel": 2}, "--tensor-parallel-size 4 and tensor_parallel: 2 differ"),
        ("--block_size=16", {"block_tokens": 64}, "--block_size 16 and block_tokens: 64 differ"),
        ("--max-model-length 8", {}, "--max-model-length: vLLM has no such flag; did you mean --max-model-len?"),
        ("--qqqqqqqqqqqqqq 8", {}, "--qqqqqqqqqqqqqq: vLLM has no such flag"),
        ("serve m --seed 1", {}, "'serve' comes before the first flag"),
        ("--hf-overrides '{", {}, "No closing quotation"),
        ("-tp", {}, "-tp: one value must follow, not 0"),
        ("-tp 1 2", {}, "-tp: one value must follow, not 2"),
        ("-tp two", {}, "-tp: 'two' is not a number"),
        ("--compilation-config.mode", {}, "--compilation-config.mode: a value must follow"),
        ("--no-enable-prefix-caching", {}, "--no-enable-prefix-caching: only true is possible: loans need"),
        ("--disable-prefix-caching", {}, "--disable-prefix-caching: only true is possible: loans need"),
        ("--disable-max-model-len", {}, "--disable-max-model-len: vLLM has no such flag"),
        ("-dph", {}, "-dph: each data-parallel rank is a worker of its own"),
        ("-dp 2", {"data_parallel": 4}, "-dp 2 and data_parallel: 4 differ"),
        ("-dc.canvas_length 8", {}, "-dc: a diffusion model writes a block of tokens again"),
        (
            "--structured-outputs-config.reasoning_parser x",
            {},
            "--structured-outputs-config: the router finds reasoning",
        ),
        ("--api-key secret", {}, "--api-key: the HTTP API is the router's: set api_keys_file there"),
    ],
)
def test_flags_that_cannot_be_honoured(flags: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=re.escape(reason)) as refused:
        worker(flags, **settings)
    assert refused.value.field == "vllm_args"
    assert "secret" not in refused.value.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is set by Tandem: set tensor_parallel"),
        ({"max_model_lem": 2}, "max_model_lem: vLLM has no such argument; did you mean max_model_len?"),
        ({"per_request_spec_decode_metrics": "summary"}, "per_request_spec_decode_metrics: receipts count"),
        ({"scheduling_policy": "fcfs"}, "scheduling_policy: only priority is possible"),
        ({"structured_outputs_config": {"reasoning_parser": "x"}}, "structured_outputs_config: the router finds"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching: only true is possible"),
    ],
)
def test_options_are_refused_as_flags_are(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=re.escape(reason)) as refused:
        worker("", vllm_options=options)
    assert refused.value.field == "vllm_options"


def test_flags_need_the_vllm_engine() -> None:
    with pytest.raises(StartError, match="flags of vLLM need engine: vllm"):
        worker("--seed 1", engine="torch")


def test_a_worker_is_the_same_after_a_command_line() -> None:
    config = worker("""-tp 2 --kv-cache-memory-bytes 1G --hf-overrides '{"a": "b c"}' --max-model-len 8k""")
    pairs = to_overrides(config)[1::2]
    assert WorkerConfig.parse(parse_overrides(pairs)) == config


def test_an_argument_is_found_in_options_and_flags() -> None:
    config = worker("-q fp8 --max-model-len 8k --max-model-len 4k", vllm_options={"max_num_seqs": 8})
    names = ("quantization", "max_model_len", "max_num_seqs", "seed")
    assert [config.vllm_option(name) for name in names] == ["fp8", "4k", 8, None]


@pytest.mark.parametrize(
    ("text", "count"), [("12", 12), ("1.5k", 1500), ("1K", 1024), ("2G", 2 << 30), ("1.5K", None), ("-1", None)]
)
def test_numbers_as_vllm_reads_them(text: str, count: int | None) -> None:
    assert count_of(text) == count


def test_the_page_names_each_flag_that_is_refused() -> None:
    """As itself or by a pattern such as `--mm-*`, in one row only."""
    rows = [
        re.findall(r"`(-[^ `]+)`", line.split("|")[1]) for line in PAGE.read_text().splitlines() if line.startswith("|")
    ]
    for flag, name in FLAGS.items():
        found = [row for row in rows if any(fnmatch.fnmatch(flag, pattern) for pattern in row)]
        wanted = 0 if name in PASSED or not flag.startswith("--") else 1
        assert len(found) == wanted, flag
    assert not WITHOUT_FLAG & {name for row in rows for name in row}


# ------------------------------------------------------------------ what people set

MOST_USED = """
    tensor_parallel_size model gpu_memory_utilization trust_remote_code max_model_len reasoning_parser
    max_num_batched_tokens kv_cache_dtype max_num_seqs enable_expert_parallel served_model_name data_parallel_size
    async_scheduling quantization enable_prefix_caching tokenizer_mode enforce_eager load_format seed block_size
    hf_overrides enable_chunked_prefill dtype allowed_local_media_path generation_config disable_chunked_mm_input
    config_format master_addr node_rank nnodes distributed_executor_backend pipeline_parallel_size logits_processors
    decode_context_parallel_size data_parallel_size_local all2all_backend data_parallel_hybrid_lb revision
    data_parallel_start_rank mamba_cache_mode reasoning_parser_plugin enable_sleep_mode data_parallel_rpc_port
    data_parallel_address mamba_ssm_cache_dtype enable_lora max_loras disable_cascade_attn runner
    kv_cache_dtype_skip_layers
"""
"""Fifty arguments of vLLM's groups for models, parallelism, cache, scheduler, LoRA, speculation and structured outputs,
by the number of files that set them in vllm-project/recipes and vllm-project/production-stack (November 2026)."""
REFUSED_STILL = {
    "allowed_local_media_path": "images",
    "logits_processors": "code of the user's own, on which a moved stream would depend",
    "decode_context_parallel_size": "KV of a part of a context",
    "data_parallel_hybrid_lb": "each rank is a worker, and the router balances",
    "revision": "org/name@revision in model, since the router needs it too",
    "reasoning_parser_plugin": "code of the user's own, in the router",
    "enable_sleep_mode": "a pool keeps its addresses",
}
"""Those of them that are refused in all or in most of their values, and why."""


def test_most_used_flags_are_taken() -> None:
    most_used = set(MOST_USED.split())
    assert len(most_used) == 50
    taken = PASSED | MAPPED.keys() | OF_ROUTER.keys() | {name for name, (values, _) in KEPT.items() if values != ("1",)}
    assert most_used - taken == set(REFUSED_STILL)
