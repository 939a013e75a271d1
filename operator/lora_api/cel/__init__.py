"""What the API server checks beyond types, as CEL: the twins of `lora_api.rules` and of the types' own validators."""

from lora_api.cel.kinds import JOB_RULES, MUTABLE_SPEC_PATHS, PROFILE_RULES, attach, immutable
from lora_api.cel.rule import Rule

__all__ = ["JOB_RULES", "MUTABLE_SPEC_PATHS", "PROFILE_RULES", "Rule", "attach", "immutable"]
