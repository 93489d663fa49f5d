"""Names of vLLM that the hosted engine uses.

`python -m cluster.launch engine.backends.vllm.contract`, in vLLM's environment, prints why its vLLM cannot be
used, if so.

Names of vLLM that a part of Tandem uses, and a check of a source tree of vLLM for them, without importing it.
"""

import ast
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from engine.errors import EngineStartError

log = logging.getLogger(__name__)


MAX_NAMED = 5
"""Names in a refusal."""


@dataclass(frozen=True, slots=True)
class UsedNames:
    """Names of vLLM that a part of Tandem uses."""

    user: str
    """Name of the part, for messages."""
    tried: tuple[str, ...]
    """Minor versions of vLLM on which the part was tried."""
    sources: tuple[Path, ...]
    """Folders and files of code that imports from vLLM."""
    members: Mapping[str, str]
    """Members of classes, by module and class; those of base classes count."""
    signatures: Mapping[str, str]
    """First parameters of functions that the part calls by position, or replaces."""

    def fault(self, number: str) -> str:
        """Return why this environment's vLLM, version `number`, cannot be used; empty where it can.

        One of an untried minor version must have the names, and a warning tells of it.
        """
        if ".".join(number.split(".")[:2]) in self.tried:
            return ""
        spec = importlib.util.find_spec("vllm")
        assert spec is not None, "its version is known"
        assert spec.origin is not None, "it is no namespace"
        missing, tried = list(self.lacking(Path(spec.origin).parents[1])), " and ".join(self.tried)
        if missing:
            shown = "; ".join(missing[:MAX_NAMED]) + (f"; {len(missing)} in all" if len(missing) > MAX_NAMED else "")
            return f"vLLM {number} lacks names that {self.user} uses: {shown} (tried: vLLM {tried})"
        log.warning("vLLM %s has all names that %s uses, but was not tried; vLLM %s was", number, self.user, tried)
        return ""

    def lacking(self, tree: Path) -> Iterator[str]:
        """Yield what a source tree of vLLM lacks; `tree` holds the folder vllm."""
        for file in sorted(
            each for source in self.sources for each in (source, *source.rglob("*.py")) if each.is_file()
        ):
            text = file.read_text()
            for node in ast.walk(ast.parse(text)) if "from vllm" in text else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                    assert node.module is not None
                    for alias in node.names:
                        if not _is_module(tree, f"{node.module}.{alias.name}") and alias.name not in _names(
                            tree, node.module
                        ):
                            yield f"{file.name}: {node.module} has no {alias.name}"
        for place, members in self.members.items():
            module, _, name = place.partition(":")
            known = _members(tree, module, name)
            yield from (f"{place} has no {member}" for member in members.split() if member not in known)
        for place, wanted in self.signatures.items():
            module, _, path = place.partition(":")
            parameters = _parameters(tree, module, path)
            if parameters[: len(wanted.split())] != wanted.split():
                yield f"{place} takes {' '.join(parameters)}"


def _file(tree: Path, module: str) -> Path | None:
    path = tree.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def _is_module(tree: Path, module: str) -> bool:
    return _file(tree, module) is not None


@cache
def _parsed(tree: Path, module: str) -> ast.Module:
    file = _file(tree, module)
    return ast.parse(file.read_text()) if file is not None else ast.Module([], [])


@cache
def _names(tree: Path, module: str) -> set[str]:
    """Return the names that a module defines or imports, at any depth; lazily imported ones stand in strings."""
    names = set()
    for node in ast.walk(_parsed(tree, module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


@cache
def _class(tree: Path, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Return a class with its module, which may be another one that `module` imports it from."""
    for node in ast.walk(_parsed(tree, module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    for node in ast.walk(_parsed(tree, module)):
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _class(tree, node.module, name)
    return None


@cache
def _members(tree: Path, module: str, name: str) -> set[str]:
    found = _class(tree, module, name)
    if found is None:
        return set()
    module, node = found
    members = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            members.add(each.name)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            members.add(each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            members.add(each.attr)
    for base in node.bases:
        if isinstance(base, ast.Name):
            members |= _members(tree, module, base.id)
    return members


def _parameters(tree: Path, module: str, path: str) -> list[str]:
    owner, _, name = path.rpartition(".")
    found = _class(tree, module, owner) if owner else (module, _parsed(tree, module))
    if found is None:
        return []
    for node in ast.walk(found[1]):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [each.arg for each in node.args.args if each.arg != "self"]
    return []


OF_KV: dict[str, str] = {
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
        "block_pool single_type_managers find_longest_cache_hit eagle_group_ids"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
        "kv_cache_spec block_size block_pool max_admission_blocks_per_request"
    ),
    "vllm.v1.core.block_pool:BlockPool": (
        "blocks get_new_blocks touch free_blocks evict_blocks get_cached_block get_num_free_blocks null_block"
        " free_block_queue hash_block_size metrics_collector _insert_block_hash"
    ),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id ref_cnt block_hash is_null reset_hash",
    "vllm.config.cache:CacheConfig": "get_resolved_kv_cache_layout",
    "vllm.v1.kv_cache_layout:KVCacheLayout": "is_block_outermost",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_groups kv_cache_tensors has_mamba_layers",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "layer_names",
    "vllm.v1.kv_cache_interface:KVCacheTensor": "size offset layer_stride block_stride layers",
    "vllm.v1.kv_cache_interface:MambaSpec": "num_speculative_blocks mamba_cache_mode",
}
"""Members that the code in `kv/` uses, and what hands it vLLM's KV memory."""
MEMBERS = OF_KV | {
    "vllm.v1.engine.core:EngineCore": (
        "__init__ scheduler model_executor vllm_config batch_queue_size check_for_draft_tokens async_scheduling"
        " structured_output_manager add_lora post_step shutdown"
    ),
    "vllm.v1.executor.abstract:Executor": (
        "get_class execute_model sample_tokens execute_dummy_batch take_draft_token_ids shutdown"
    ),
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": "__init__ start_worker_monitor collective_rpc output_rank",
    "vllm.config.parallel:ParallelConfig": (
        "data_parallel_master_port _data_parallel_master_port_list data_parallel_rank_local dp_sync_interval"
    ),
    "vllm.config.model:ModelConfig": "is_moe",
    "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase": "all_gatherv",
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "schedule update_from_output add_request finish_requests has_requests get_grammar_bitmask"
        " update_draft_token_ids_in_output requests running waiting kv_cache_manager kv_cache_config"
        " max_num_scheduled_tokens num_spec_tokens num_lookahead_tokens hash_block_size defer_block_free deferred_frees"
        " _try_schedule_encoder_inputs encoder_cache_manager max_num_encoder_input_tokens ec_connector"
    ),
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager": "cache_size",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "data modality identifier mm_position mm_hash",
    "vllm.multimodal.inputs:PlaceholderRange": "offset length is_embed get_num_embeds",
    "vllm.v1.serial_utils:MsgpackEncoder": "encode",
    "vllm.v1.serial_utils:MsgpackDecoder": "decode",
    "vllm.config.ec_transfer:ECTransferConfig": "ec_connector ec_connector_module_path ec_role",
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorBase": (
        "is_producer has_cache_item update_state_after_alloc build_connector_meta request_finished start_load_caches"
        " save_caches _get_connector_metadata"
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens"
        " scheduled_spec_decode_tokens num_invalid_spec_tokens finished_req_ids pending_structured_output_tokens"
    ),
    "vllm.v1.core.sched.output:NewRequestData": "req_id block_ids num_computed_tokens prefill_token_ids",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids new_block_ids num_computed_tokens resumed_req_ids",
    "vllm.v1.request:Request": (
        "request_id status num_computed_tokens num_in_flight_tokens num_tokens num_preemptions block_hashes"
        " all_token_ids append_output_token_ids prefill_stats structured_output_request"
    ),
    "vllm.v1.request:RequestStatus": "PREEMPTED FINISHED_ABORTED",
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors finish_reason num_nans_in_logits"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "coordinator get_block_ids block_pool",
    "vllm.config.vllm:VllmConfig": (
        "use_v2_model_runner num_prefill_lookahead_tokens speculative_config scheduler_config cache_config model_config"
    ),
    "vllm.config.speculative:SpeculativeConfig": (
        "method draft_model_config disable_eagle_block_drop uses_draft_kv_cache num_speculative_tokens"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "get_required_kvcache_layout requires_kv_delivery register_kv_caches bind_gpu_block_pool"
        " get_num_new_matched_tokens update_state_after_alloc request_finished build_connector_meta start_load_kv"
        " wait_for_layer_load save_kv_layer wait_for_save get_mem_pool_context"
    ),
    "vllm.v1.structured_output:StructuredOutputManager": "grammar_init backend executor",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler": (
        "__call__ _verify sampler num_speculative_steps use_block_verification synthetic_conditional_rates"
    ),
    "vllm.v1.worker.gpu.sample.sampler:Sampler": "apply_sampling_params sampling_states use_fp64_gumbel",
}
SIGNATURES: dict[str, str] = {
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "scheduler_output model_runner_output",
    "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs": (
        "request num_computed_tokens num_new_tokens encoder_compute_budget"
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "request_ids finished_status",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit": (
        "block_hashes max_cache_hit_length"
    ),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify": (
        "logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np expanded_idx_mapping"
        " expanded_local_pos seq_lens_upper_bound_np"
    ),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params": (
        "logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos"
        " seq_lens_upper_bound_np"
    ),
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample": (
        "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting"
    ),
}
USED = UsedNames("Tandem", ("0.31", "0.32"), (Path(__file__).parents[2],), MEMBERS, SIGNATURES)


def check_version(number: str) -> None:
    """Check this environment's vLLM.

    Raises EngineStartError with the names that it lacks.
    """
    if reason := USED.fault(number):
        raise EngineStartError("vllm_python", reason)


def main() -> None:
    """Print why the vLLM beside this interpreter cannot be used; nothing where it can."""
    if reason := USED.fault(version("vllm")):
        print(reason)
