"""vLLM's own media processing, without an engine: no weights are loaded, and no device is used.

Files are hostile. A picture's format and size are checked before its pixels are decoded, and what is hashed are pixels,
never a name within the file.
"""

import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, get_args

from engine.backends.vllm.arguments import passed_arguments
from engine.backends.vllm.contract import check_version
from engine.backends.vllm.settings import VllmSettings
from engine.errors import EngineStartError, ModelRefused
from engine.media import (
    NUMBER,
    MediaInput,
    MediaKind,
    MediaLimits,
    MediaProcessor,
    MediaRefused,
    Modality,
    Processed,
)

log = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of pictures; of an animated one the first frame is taken."""
ANY_NUMBER = 999
"""vLLM's limit of items where none is set."""
DECODERS: dict[MediaKind, tuple[str, ...]] = {"image": ("PIL",), "audio": ("soundfile", "av"), "video": ("cv2",)}
"""Modules that decode each kind."""
CONTAINERS: dict[MediaKind, dict[str, bytes]] = {
    "audio": {
        "WAV": rb"RIFF....WAVE",
        "FLAC": rb"fLaC",
        "Ogg": rb"OggS",
        "MP3": rb"ID3|\xff[\xf2\xf3\xfa\xfb]",
        "MP4": rb"\0\0..ftyp",
        "WebM": rb"\x1aE\xdf\xa3",
    },
    "video": {"MP4": rb"\0\0..ftyp", "WebM": rb"\x1aE\xdf\xa3", "AVI": rb"RIFF....AVI "},
}
"""Formats of sounds and videos, with a pattern of their first bytes."""
FFMPEG_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
"""Formats that FFmpeg may find in a file. It also knows playlists, and would read the files and URLs that they name."""
BY_FFMPEG = ("MP4", "WebM")
"""Formats of sounds that FFmpeg decodes; libsndfile decodes the others."""
RATE_STEP, MAX_RATE = 25, 192_000
"""Sample rates are multiples of one, up to the other: the filter from other rates to the model's takes gigabytes."""
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
        self._tokenizer = self._inputs.get_tokenizer()

    def process(
        self, token_ids: Sequence[int], media: Sequence[MediaInput], limits: MediaLimits, thumbnails: bool = False
    ) -> Processed:
        from vllm import SamplingParams

        from engine.backends.vllm.media.features import pack
        from engine.backends.vllm.media.thumbnails import thumbnails_of

        self._check_places(token_ids, media)
        decoded: dict[str, list[Any]] = {}
        for place, each in enumerate(media):
            try:
                decoded.setdefault(each.kind, []).append(self._decode(each, limits))
            except MediaRefused as error:
                raise MediaRefused(error.reason, place) from None
            except (OSError, RuntimeError, ValueError, SyntaxError, EOFError, OverflowError) as error:
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
        for kind, modality in self.modalities.items():
            num_files = sum(each.kind == kind for each in media)
            texts = {modality.placeholder.replace(NUMBER, str(number + 1)) for number in range(num_files + 1)} - {""}
            num_places = sum(self._num_places(token_ids, text) for text in texts)
            if num_places > num_files:
                raise MediaRefused(f"the prompt has {num_places} places for {kind}, and there are {num_files} files")

    def _num_places(self, token_ids: Sequence[int], placeholder: str) -> int:
        """Return how often a prompt has the tokens of a placeholder."""
        place = self._tokenizer.encode(placeholder, add_special_tokens=False)
        starts = [at for at, token in enumerate(token_ids) if token == place[0]]
        return sum(list(token_ids[at : at + len(place)]) == place for at in starts)

    def _decode(self, media: MediaInput, limits: MediaLimits) -> Any:
        """Return what vLLM takes for a file. Raises MediaRefused, and what decoders raise."""
        if media.kind == "image":
            return decode_picture(media.data, limits.max_pixels)
        formats = CONTAINERS[media.kind]
        found = (name for name, begin in formats.items() if re.match(begin, media.data, re.DOTALL))
        if (container := next(found, None)) is None:
            raise MediaRefused(f"the file is no {media.kind} of a known format ({', '.join(formats)})")
        options = dict(self._options.get(media.kind, {}))
        if media.kind == "audio":
            return decode_sound(media.data, container, limits.max_sound_s, options)
        from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

        os.environ["VLLM_MAX_IMAGE_PIXELS"] = str(limits.max_pixels)  # vLLM checks the size of each frame
        return VideoMediaIO(ImageMediaIO(), **options).load_bytes(media.data).media


def open_vllm_media_processor(config: VllmSettings) -> VllmMediaProcessor:
    """Open the processor of the settings' model. Raises EngineStartError."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # its log lines are Tandem's
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ |= {"OPENCV_LOG_LEVEL": "SILENT", "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = f"format_whitelist;{FFMPEG_FORMATS}"
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
    processor = VllmMediaProcessor(model_config)
    if not processor.modalities:
        raise EngineStartError("vllm_python", "its environment lacks the decoders of what the model reads")
    return processor


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


def decode_sound(data: bytes, container: str, max_sound_s: int, options: dict[str, Any]) -> Any:
    """Return a sound's samples and their rate; `options` are vLLM's. Raises MediaRefused, and what decoders raise."""
    import av
    import soundfile
    from vllm.multimodal.media import AudioMediaIO

    backend = "pyav" if container in BY_FFMPEG else "soundfile"
    os.environ["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"] = str(len(data))  # the preprocessor has checked the size
    os.environ["VLLM_MAX_AUDIO_DECODE_DURATION_S"] = str(max_sound_s)
    try:
        if backend == "pyav":
            av.open(BytesIO(data), options={"format_whitelist": FFMPEG_FORMATS}).close()
        samples, rate = AudioMediaIO(**{"audio_backend": backend} | options).load_bytes(data)
    except soundfile.LibsndfileError as error:
        raise MediaRefused(f"the file cannot be read: {error.error_string}") from None
    except av.error.FFmpegError as error:
        raise MediaRefused(f"the file cannot be read: {error.strerror}") from None
    except ValueError as error:
        if "VLLM_MAX_AUDIO_DECODE_DURATION_S" in str(error):
            raise MediaRefused(f"the sound is longer than {max_sound_s} s (max_sound_s)") from None
        if "VLLM_MAX_AUDIO_DECODE_BYTES" in str(error):
            raise MediaRefused("the samples of all channels of the sound take more than 256 MiB") from None
        raise
    if not len(samples):
        raise MediaRefused("the file has no sound")
    if rate % RATE_STEP or rate > MAX_RATE:
        raise MediaRefused(f"the sound has {rate} samples a second: no multiple of {RATE_STEP} up to {MAX_RATE}")
    return samples, rate


def _modalities(model_config: Any) -> Iterator[tuple[MediaKind, Modality]]:
    """Yield what a model reads, of the kinds that this environment can decode."""
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.multimodal import MULTIMODAL_REGISTRY

    limits = MULTIMODAL_REGISTRY.create_processor(model_config).info.allowed_mm_limits
    model_class: Any = get_model_cls(model_config)
    kind: MediaKind
    for kind in get_args(MediaKind):
        if not (limit := int(limits.get(kind, 0))):
            continue
        if missing := [name for name in DECODERS[kind] if importlib.util.find_spec(name) is None]:
            log.warning("media of kind %s are not read: vLLM's environment lacks %s", kind, " and ".join(missing))
            continue
        first, second = (model_class.get_placeholder_str(kind, number) or "" for number in (1, 2))
        numbered = first.replace("1", NUMBER, 1) if first != second else first
        if numbered.replace(NUMBER, "2") != second:
            numbered, limit = first, 1  # it stands for the first item only
        yield kind, Modality(numbered, 0 if limit >= ANY_NUMBER else limit)


def _reason(error: Exception) -> str:
    """Return the first line of an error, shortened."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return first if len(first) <= MAX_REASON_CHARS else f"{first[:MAX_REASON_CHARS]} ..."
