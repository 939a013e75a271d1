"""Tiny models of the real architectures, for tests, demonstrations and machines without a GPU."""

from lora_trainer.tiny.make import make_tiny

__all__ = ["make_tiny"]
