"""Let torchvision be imported beside a CPU build of torch.

transformers' Qwen-VL processors and qwen-vl-utils import torchvision for its image transforms. The default torchvision
wheel is built for CUDA: beside a CPU build of torch its compiled extension does not load. torchvision tolerates that,
except that it registers shape functions for two operators of the missing extension and stops with "operator
torchvision::nms does not exist". Declaring the two operators, without an implementation, lets the import pass. Nothing
here or in the Qwen-VL processors calls them; a call still fails, with torch's own message.

Every process that imports torchvision, directly or through transformers, has to call `register_missing_ops` first.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Operators vanish with the library object that declared them, so it lives as long as the module.
_libraries: list[torch.library.Library] = []


def register_missing_ops() -> bool:
    """Declare `torchvision::nms` and `torchvision::qnms` where torchvision's own extension cannot be loaded.

    Does nothing on a CUDA build of torch, where torchvision is absent, where its extension loads, and on later calls.

    Returns:
        Whether this call declared the operators.
    """
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms") or _load_extension():
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    _libraries.append(library)
    return True


def _load_extension() -> bool:
    """Load torchvision's compiled operators as torchvision itself would; True also where torchvision is not installed.

    The operators exist only once the extension is loaded, so this must be tried before declaring them: two declarations
    of one operator are an error.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    extensions = [path for path in Path(spec.origin).parent.glob("_C*") if path.suffix in {".so", ".pyd", ".dylib"}]
    for path in extensions:
        try:
            torch.ops.load_library(str(path))
        except OSError:
            continue
        return True
    return False
