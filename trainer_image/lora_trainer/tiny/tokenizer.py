"""A small Qwen tokenizer trained in memory: byte-level, so that it meets no unknown character."""

from __future__ import annotations

import json
from typing import Any

CORPUS = """a photo of a red cube on a wooden table
a small green ball next to a blue box, an oil painting of a cat sitting in the grass
watercolor of a ship at sunset, soft light, a man walking through the city at night
flat vector illustration of a tree, white background, the woman holds a yellow flower
close up portrait of an astronaut, a cup of coffee, a rocket on its way to the stars
in the style of, a photograph of, a drawing of, with a dark background"""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{'<think>\n\n</think>\n\n'}}{% endif %}{% endif %}"
)
"""The chat template of Qwen3, as far as captions need it."""


def build_tokenizer(vocabulary: int = 600, max_tokens: int = 64) -> Any:
    """A `Qwen2Tokenizer`.

    Args:
        vocabulary: Entries to train; the 256 bytes are always among them.
        max_tokens: Longest caption, template included. Short, because FLUX.2 pads every caption to it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    result = Qwen2Tokenizer(
        vocab=dict(model["vocab"]),
        merges=merges,
        model_max_length=max_tokens,
        chat_template=CHAT_TEMPLATE,
        unk_token=None,
        eos_token="<|im_end|>",  # noqa: S106 a token of text
        pad_token="<|endoftext|>",  # noqa: S106 as above
    )
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    result.add_tokens(["<think>", "</think>"])
    return result
