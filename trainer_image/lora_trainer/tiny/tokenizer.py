"""Small tokenizers trained in memory. Those of Qwen and CLIP are byte-level: they meet no unknown character."""

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
    from transformers import Qwen2Tokenizer

    vocab, merges = _byte_pairs(vocabulary, suffix="")
    result = Qwen2Tokenizer(
        vocab=vocab,
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


def build_clip_tokenizer(vocabulary: int = 900, pad: str = "<|endoftext|>") -> Any:
    """A `CLIPTokenizer`: 77 tokens; start and end have the highest ids, as in the real one.

    Args:
        vocabulary: Entries to train; every byte is among them, alone and as the end of a word.
        pad: The padding token: the end token, or `!` as for SDXL's second encoder.
    """
    from transformers import CLIPTokenizer

    vocab, merges = _byte_pairs(vocabulary, suffix="</w>")
    for token in (*(f"{byte}</w>" for byte in sorted(vocab) if len(byte) == 1), "<|startoftext|>", "<|endoftext|>"):
        vocab.setdefault(token, len(vocab))
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77, pad_token=pad)


def build_t5_tokenizer(max_tokens: int = 64) -> Any:
    """A `T5Tokenizer`: the words of the corpus and the printable ASCII characters.

    Args:
        max_tokens: Longest caption. Short, because FLUX.1 pads every caption to it.
    """
    from transformers import T5Tokenizer

    words = sorted({word for word in CORPUS.replace(",", " ").split() if len(word) > 1})
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocab += [(chr(code), -9.0) for code in range(33, 127)]
    vocab += [(f"\u2581{word}", -4.0) for word in words]
    vocab += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return T5Tokenizer(vocab=vocab, model_max_length=max_tokens)


def _byte_pairs(vocabulary: int, suffix: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE; `suffix` marks the end of a word, where it is marked.

    With a suffix the library's order changes from process to process among pairs that are equally frequent: there the
    pairs are put in an order of their own, short ones first, and tokens are numbered in it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    ending: dict[str, Any] = {"end_of_word_suffix": suffix} if suffix else {}
    tokenizer = Tokenizer(models.BPE(**ending))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False, special_tokens=[], **ending
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if not suffix:
        return dict(model["vocab"]), [(first, second) for first, second in pairs]
    ordered = sorted(((first, second) for first, second in pairs), key=lambda pair: (len("".join(pair)), pair))
    tokens = dict.fromkeys([*alphabet, *("".join(pair) for pair in ordered)])
    return {token: number for number, token in enumerate(tokens)}, ordered
