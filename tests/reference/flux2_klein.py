"""FLUX.2 Klein, 4B and 9B: text from three layers of Qwen3, no guidance input; the rest is in `flux2`.

From the model card of black-forest-labs/FLUX.2-klein-base-4B and diffusers'
`pipelines/flux2/pipeline_flux2_klein.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tests.reference import flux2
from tests.reference.common import Recipe, frozen


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    text_encoder = frozen(Qwen3ForCausalLM.from_pretrained(folder / "text_encoder"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    length = min(512, tokenizer.model_max_length)

    # captions to hidden states 9, 18 and 27 side by side; padding is encoded too, and not masked later
    @cache
    def embed(caption: str) -> torch.Tensor:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        tokens = tokenizer(chat, return_tensors="pt", padding="max_length", truncation=True, max_length=length)
        with torch.no_grad():
            hidden = text_encoder(**tokens, output_hidden_states=True).hidden_states
        return torch.cat([hidden[9][0], hidden[18][0], hidden[27][0]], dim=-1)

    return flux2.losses(folder, data, recipe, embed, guidance=None)
