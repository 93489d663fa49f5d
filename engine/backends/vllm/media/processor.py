"""vLLM's own media processing, without an engine: no weights are loaded, and no device is used.

Files are hostile. A picture's format and size are checked before its pixels are decoded, and what is hashed are pixels,
never a name within the file.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, get_args

from engine.backends.vllm.arguments import check_version, passed_arguments
from engine.backends.vllm.settings import VllmSettings
from engine.errors import EngineStartError, ModelRefused
from engine.media.processor import MediaInput, MediaKind, MediaProcessor, MediaRefused, Modality, Processed

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of pictures; of an animated one the first frame is taken."""
ANY_NUMBER = 999
"""vLLM's limit of items where none is set."""
DECODERS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("PIL",),
    "audio": ("soundfile", "av", "torchcodec"),
    "video": ("cv2", "torchcodec"),
}
"""Modules that decode each kind, of which one is enough."""
CONTAINERS: dict[MediaKind, dict[str, tuple[tuple[int, bytes], ...]]] = {
    "audio": {
        "WAV": ((0, b"RIFF"), (8, b"WAVE")),
        "FLAC": ((0, b"fLaC"),),
        "Ogg": ((0, b"OggS"),),
        "MP3": ((0, b"ID3"),),
        "MP3 without a tag": ((0, b"\xff\xfb"),),
        "MP4": ((4, b"ftyp"),),
        "WebM": ((0, b"\x1aE\xdf\xa3"),),
    },
    "video": {
        "MP4": ((4, b"ftyp"),),
        "WebM": ((0, b"\x1aE\xdf\xa3"),),
        "AVI": ((0, b"RIFF"), (8, b"AVI ")),
    },
}
"""Formats of sounds and videos, with bytes that they have at an offset. FFmpeg would also take playlists, and then read
the files and URLs that they name."""
MAX_REASON_CHARS = 300


class VllmMediaProcessor(MediaProcessor):
    """Processor of a model that vLLM knows."""

    def __init__(self, model_config: Any) -> None:
        """Open it for a ModelConfig of vLLM's."""
        from vllm.config import VllmConfig
        from vllm.v1.engine.input_processor import InputProcessor

        model_config.quantization = None  # it needs no device that computes with such weights
        self._inputs = InputProcessor(VllmConfig(model_config=model_config))
        self._options = model_config.multimodal_config.media_io_kwargs or {}
        self.modalities = dict(_modalities(model_config))
        tokenizer = self._inputs.get_tokenizer()
        self._places = {
            kind: tuple(tokenizer.encode(each.placeholder, add_special_tokens=False))
            for kind, each in self.modalities.items()
            if each.placeholder
        }
        """Tokens of each placeholder."""

    def process(
        self, token_ids: Sequence[int], media: Sequence[MediaInput], max_pixels: int, thumbnails: bool = False
    ) -> Processed:
        from vllm import SamplingParams

        from engine.backends.vllm.media.features import pack
        from engine.backends.vllm.media.thumbnails import thumbnails_of

        self._check_places(token_ids, media)
        decoded: dict[str, list[Any]] = {}
        for place, each in enumerate(media):
            try:
                decoded.setdefault(each.kind, []).append(self._decode(each, max_pixels))
            except MediaRefused as error:
                raise MediaRefused(error.reason, place) from None
            except (OSError, ValueError, SyntaxError, EOFError, OverflowError) as error:
                raise MediaRefused(f"the file cannot be read: {_reason(error)}", place) from None
        prompt = {"prompt_token_ids": list(token_ids), "multi_modal_data": decoded}
        params = SamplingParams(max_tokens=1)
        try:
            request = self._inputs.process_inputs("media", prompt, params, supported_tasks=("generate",))
        except (ValueError, RuntimeError, AssertionError) as error:
            raise MediaRefused(f"the model's processor refuses it: {_reason(error)}") from error
        features = request.mm_features or []
        if len(features) != len(media):
            raise MediaRefused(f"the prompt has places for {len(features)} files, not for {len(media)}")
        small = thumbnails_of(decoded.get("image", ())) if thumbnails else ()
        return Processed(list(request.prompt_token_ids or ()), [pack(feature) for feature in features], small)

    def _check_places(self, token_ids: Sequence[int], media: Sequence[MediaInput]) -> None:
        """Raise MediaRefused for placeholders without a file, which vLLM would leave in the prompt."""
        for kind, place in self._places.items():
            starts = [at for at, token in enumerate(token_ids) if token == place[0]]
            num_places = sum(tuple(token_ids[at : at + len(place)]) == place for at in starts)
            num_files = sum(each.kind == kind for each in media)
            if num_places > num_files:
                raise MediaRefused(f"the prompt has {num_places} places for {kind}, and there are {num_files} files")

    def _decode(self, media: MediaInput, max_pixels: int) -> Any:
        """Return what vLLM takes for a file. Raises MediaRefused, and what decoders raise."""
        if media.kind == "image":
            return decode_picture(media.data, max_pixels)
        formats = CONTAINERS[media.kind]
        if not any(all(media.data.startswith(has, at) for at, has in marks) for marks in formats.values()):
            raise MediaRefused(f"the file is no {media.kind} of a known format ({', '.join(formats)})")
        os.environ["VLLM_MAX_IMAGE_PIXELS"] = str(max_pixels)  # vLLM's decoders of videos check each frame's size
        options = dict(self._options.get(media.kind, {}))
        if media.kind == "audio":
            from vllm.multimodal.media import AudioMediaIO

            return AudioMediaIO(**options).load_bytes(media.data)
        from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

        return VideoMediaIO(ImageMediaIO(), **options).load_bytes(media.data).media


def open_vllm_media_processor(config: VllmSettings) -> VllmMediaProcessor:
    """Open the processor of the settings' model. Raises EngineStartError."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # its log lines are Tandem's
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ |= {"OPENCV_LOG_LEVEL": "SILENT", "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Python's warnings about vLLM's code, and PIL's about files
    try:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
    except ImportError as error:
        raise EngineStartError("vllm_python", f"its environment cannot import vLLM: {error}") from None
    check_version(vllm.__version__)
    options = {"dtype": config.dtype, **config.vllm_options, **passed_arguments(config)}
    options |= {"model": str(config.model), "load_format": "dummy", "mm_processor_cache_gb": 0}
    try:
        model_config = AsyncEngineArgs(**options).create_model_config()
    except TypeError as error:
        raise EngineStartError("vllm_options", str(error)) from None
    except ValueError as error:
        raise ModelRefused(_reason(error)) from None
    if not model_config.is_multimodal_model:
        raise ModelRefused(f"{model_config.architecture} reads text only, so it needs no preprocessor")
    return VllmMediaProcessor(model_config)


def decode_picture(data: bytes, max_pixels: int) -> Any:
    """Return a picture's pixels as an RGB image, upright. Raises MediaRefused, and what PIL raises."""
    from PIL import Image, UnidentifiedImageError
    from vllm.multimodal.image import convert_image_mode, normalize_image

    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise MediaRefused(f"the file is no picture of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise MediaRefused(f"the picture has more than {max_pixels} pixels") from None
    width, height = image.size
    if width * height > max_pixels:
        raise MediaRefused(f"the picture has {width} x {height} pixels, more than {max_pixels}")
    image.load()
    upright = convert_image_mode(normalize_image(image), "RGB")
    plain = Image.new("RGB", upright.size)  # without the file's metadata, from which vLLM would take an identifier
    plain.paste(upright)
    return plain


def _modalities(model_config: Any) -> Iterator[tuple[MediaKind, Modality]]:
    """Yield what a model reads, of the kinds that this environment can decode."""
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.multimodal import MULTIMODAL_REGISTRY

    limits = MULTIMODAL_REGISTRY.create_processor(model_config).info.allowed_mm_limits
    model_class: Any = get_model_cls(model_config)
    kind: MediaKind
    for kind in get_args(MediaKind):
        if not (limit := int(limits.get(kind, 0))) or not any(map(importlib.util.find_spec, DECODERS[kind])):
            continue
        texts = [model_class.get_placeholder_str(kind, number) or "" for number in (1, 2)]
        most = limit if texts[0] == texts[1] else 1  # a numbered placeholder stands for the first item only
        yield kind, Modality(texts[0], 0 if most >= ANY_NUMBER else most)


def _reason(error: Exception) -> str:
    """Return the first line of an error, shortened."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return first if len(first) <= MAX_REASON_CHARS else f"{first[:MAX_REASON_CHARS]} ..."
