"""Model families: all that differs between base models, one small file each.

The rest of the trainer sees a `BaseModel` and never asks which family it came from.
"""

from lora_trainer.families.base import BaseModel, Conditioning
from lora_trainer.families.family import Family
from lora_trainer.families.folder import ModelError
from lora_trainer.families.registry import family_for, known_archs

__all__ = ["BaseModel", "Conditioning", "Family", "ModelError", "family_for", "known_archs"]
