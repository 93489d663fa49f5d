"""Names of vLLM that TandemConnector uses.

`python -m cluster.launch tandem_connector.contract`, in vLLM's environment, prints why its vLLM cannot be used, if so.
"""

from importlib.metadata import version
from pathlib import Path

from cluster.errors import StartError
from engine.backends.vllm import contract as hosted
from engine.backends.vllm.contract import UsedNames

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_POOL = "vllm.v1.core.block_pool:BlockPool"
MEMBERS = hosted.OF_KV | {
    _POOL: f"{hosted.OF_KV[_POOL]} cache_full_blocks reset_prefix_cache",
    f"{_CONNECTORS}.base:KVConnectorBase_V1": (
        "get_required_kvcache_layout requires_kv_delivery get_mem_pool_context register_kv_caches"
        " bind_kv_cache_manager bind_gpu_block_pool on_new_request get_num_new_matched_tokens"
        " update_state_after_alloc build_connector_meta update_connector_output request_finished"
        " get_handshake_metadata set_xfer_handshake_metadata_pp_aware get_kv_connector_stats build_kv_connector_stats"
        " build_prom_metrics shutdown start_load_kv wait_for_layer_load save_kv_layer wait_for_save"
        " reset_cache"
    ),
    f"{_CONNECTORS}.base:SupportsHMA": "request_finished_all_groups",
    f"{_CONNECTORS}.metrics:KVConnectorStats": "data aggregate reduce reset is_empty",
    f"{_CONNECTORS}.metrics:KVConnectorPromMetrics": (
        "observe per_engine_labelvalues _counter_cls _gauge_cls _histogram_cls _labelnames"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "coordinator block_pool allocate_slots get_block_ids",
    "vllm.v1.request:Request": (
        "request_id num_computed_tokens num_in_flight_tokens num_tokens num_prompt_tokens block_hashes all_token_ids"
        " prompt_token_ids kv_transfer_params lora_request cache_salt mm_features num_preemptions"
        " skip_reading_prefix_cache status priority prompt_embeds resumable pooling_params"
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens total_num_scheduled_tokens",
    "vllm.config.kv_transfer:KVTransferConfig": (
        "kv_role is_kv_producer is_kv_consumer kv_connector_extra_config get_from_extra_config engine_id"
    ),
}
SIGNATURES = {
    f"{_CONNECTORS}.base:KVConnectorBase_V1.{name}": parameters
    for name, parameters in {
        "__init__": "vllm_config role kv_cache_config",
        "get_num_new_matched_tokens": "request num_computed_tokens",
        "update_state_after_alloc": "request blocks num_external_tokens",
        "request_finished": "request block_ids",
        "build_prom_metrics": "cls vllm_config metric_types labelnames per_engine_labelvalues",
    }.items()
}
SOURCES = (
    Path(__file__).parent,
    *(Path(hosted.__file__).with_name(each) for each in ("kv", "connector.py", "batch_runner.py")),
)
USED = UsedNames("TandemConnector", ("0.31", "0.32"), SOURCES, MEMBERS, SIGNATURES)


def check_version(number: str) -> None:
    """Check this environment's vLLM.

    Raises StartError with the names that it lacks.
    """
    if reason := USED.fault(number):
        raise StartError("kv_connector", reason)


def main() -> None:
    """Print why the vLLM beside this interpreter cannot be used; nothing where it can."""
    if reason := USED.fault(version("vllm")):
        print(reason)
