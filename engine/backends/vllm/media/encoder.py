"""vLLM's encoder-only mode: an engine that holds the encoder of a model and no language model."""

from itertools import count
from typing import Any

from engine.backends.vllm.arguments import computes_at_launch, quiet_vllm, set_environment
from engine.backends.vllm.settings import VllmSettings
from engine.errors import EngineStartError, ModelRefused
from engine.media import Embeddings, MediaEncoder, encoder_fingerprint
from engine.model.model_dir import ModelDir
from kvcache.items import Item

UNUSED_KV_BYTES = 64 << 20
"""KV memory on a CPU, where vLLM needs some that nothing uses."""
GPU_SHARE = 0.3
"""Share of a GPU's memory, unless vllm_options say otherwise; an encode worker may stand beside another worker."""


class VllmEncoder(MediaEncoder):
    """Encoder of a model that vLLM knows."""

    def __init__(self, engine: Any, fingerprint: bytes) -> None:
        """Create it for vLLM's EngineCore in encoder-only mode."""
        self.fingerprint = fingerprint
        self._engine = engine
        self._numbers = count(1)

    def encode(self, item: Item, blob: bytes) -> Embeddings:
        from vllm import SamplingParams
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        from engine.backends.vllm.media.embeddings import COMPUTED
        from engine.backends.vllm.media.features import unpack

        read = unpack(item, blob)
        name = f"item-{next(self._numbers)}"  # vLLM keeps outputs by name, and this worker keeps them itself
        place = PlaceholderRange(0, item.length, read.mm_position.is_embed)
        feature = MultiModalFeatureSpec(read.data, read.modality, name, place, name)
        sampling = SamplingParams(temperature=0, max_tokens=1)
        self._engine.add_request(Request(name, [0] * item.length, sampling, None, mm_features=[feature]))
        try:
            while name not in COMPUTED and self._engine.scheduler.has_requests():
                self._engine.step_fn()
        finally:
            self._engine.abort_requests([name])
            while self._engine.scheduler.has_requests():
                self._engine.step_fn()
        if (embeddings := COMPUTED.pop(name, None)) is None:
            raise ValueError(f"vLLM did not encode the item {item.identifier.hex()}")
        return embeddings


def open_vllm_encoder(config: VllmSettings) -> VllmEncoder:
    """Load the encoder of the settings' model. Raises EngineStartError."""
    set_environment()
    quiet_vllm()
    on_cpu = computes_at_launch()
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from engine.backends.vllm.arguments import passed_arguments
    from engine.backends.vllm.contract import check_version
    from engine.backends.vllm.media.embeddings import producer

    check_version(vllm.__version__)
    options: dict[str, Any] = {
        "gpu_memory_utilization": GPU_SHARE,
        **({"kv_cache_memory_bytes": UNUSED_KV_BYTES, "enforce_eager": True} if on_cpu else {}),
        "dtype": config.dtype,
        **config.vllm_options,
        **passed_arguments(config),
        "model": str(config.model),
        "mm_processor_cache_gb": 0,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "ec_transfer_config": producer(),
    }
    try:
        vllm_config = EngineArgs(**options).create_engine_config()
    except TypeError as error:
        raise EngineStartError("vllm_options", str(error)) from None
    except ValueError as error:
        raise ModelRefused(str(error).splitlines()[0]) from None
    engine = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    weights = ModelDir.open(config.model).weights_fingerprint()
    return VllmEncoder(engine, encoder_fingerprint(weights, str(vllm_config.model_config.dtype)))
