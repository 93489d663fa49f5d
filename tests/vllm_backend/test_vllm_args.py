"""Flags of `vllm serve`: none is unclassified, and an engine started by flags has what they say."""

import json
import subprocess

import pytest

from cluster.errors import StartError
from engine.vllm_flags import FLAGS, NAMES, flags_of
from support.real_engines import RealEngine, engines, greedy
from support.vllm_engines import BLOCK, PYTHON, STORYTELLER, ids, need_vllm, vllm_engine

pytestmark = [need_vllm]
WALK = """
import dataclasses, json
from importlib.metadata import version
from vllm.engine.arg_utils import EngineArgs
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

flags = [[a.dest, a.option_strings] for a in make_arg_parser(FlexibleArgumentParser())._actions]
print(json.dumps([version("vllm"), flags, [field.name for field in dataclasses.fields(EngineArgs)]]))
"""
"""Prints vLLM's version, the flags of `vllm serve` and the arguments of EngineArgs."""
NEWEST = "0.33"
"""Minor version of vLLM that has every argument; older ones lack some."""
PROMPT = list(range(5, 105))


def test_vllm_has_these_flags_and_no_others() -> None:
    ran = subprocess.run([PYTHON, "-c", WALK], capture_output=True, text=True, check=True)
    version, flags, fields = json.loads(ran.stdout.splitlines()[-1])
    names = {name for name, _ in flags} | set(fields)
    assert names <= NAMES
    read = {flag: next(flags_of(flag)) for _, written in flags for flag in written}
    assert {flag: each.name for flag, each in read.items()} == {flag: name for name, each in flags for flag in each}
    if version.startswith(f"{NEWEST}."):
        assert (names, {flag for flag, each in read.items() if not each.is_off}) == (NAMES, FLAGS.keys())


async def test_an_engine_started_by_flags() -> None:
    """It computes what an engine computes that is started by settings."""
    flags = f"""-tp 1 --max_model_len=640 --max-num-seqs 16 --block-size {BLOCK} --kv-cache-memory-bytes 32M
        --dtype float --enable-prefix-caching --compilation-config.mode 0 --enforce-eager
        --hf-overrides '{{"tandem": "unused"}}'"""
    by_flags = RealEngine("flags", STORYTELLER, engine="vllm", vllm_python=PYTHON, kv_memory_mib=32, vllm_args=flags)
    by_settings = vllm_engine("settings", kv_memory_mib=32, vllm_options={"max_model_len": 640})
    async with engines(by_flags, by_settings):
        for fact in ("max_context_tokens", "block_tokens", "num_blocks"):
            assert getattr(by_flags.ready, fact) == getattr(by_settings.ready, fact)
        assert by_flags.ready.model_fingerprint != by_settings.ready.model_fingerprint, "overrides may change the KV"
        assert by_flags.ready.max_context_tokens == 640
        answers = [await each.answer(greedy("a", PROMPT)) for each in (by_flags, by_settings)]
        assert ids(answers[0]) == ids(answers[1])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--max-num-seqs many", "argument --max-num-seqs: invalid"),
        ("--enforce-eager 1", "unrecognized arguments: 1"),
        ("--max-model-len 512", "max_model_len has another value in vllm_options"),
    ],
)
async def test_values_that_vllm_or_the_options_contradict_are_refused(flags: str, reason: str) -> None:
    engine = vllm_engine("refused", vllm_args=flags)
    try:
        with pytest.raises(StartError, match=reason) as raised:
            await engine.start()
        assert raised.value.field == "vllm_args"
    finally:
        await engine.host.stop()
