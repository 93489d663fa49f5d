"""Stand-in, in Dynamo's environment, for a module that reads images.

The module needs torchvision, which has no build beside this torch. No request of the comparison has an image.
"""

import sys
import types

stand_in = types.ModuleType("transformers.models.qwen2_vl.image_processing_qwen2_vl")
stand_in.smart_resize = None  # type: ignore[attr-defined]
sys.modules[stand_in.__name__] = stand_in
