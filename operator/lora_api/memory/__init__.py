"""How much memory a run needs, told before anything is loaded: pure arithmetic over shapes, without torch."""

from lora_api.memory.estimate import Estimate, estimate_of
from lora_api.memory.shapes import ModelShapes, read_folder

__all__ = ["Estimate", "ModelShapes", "estimate_of", "read_folder"]
