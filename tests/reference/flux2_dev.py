"""FLUX.2 dev: text from three layers of Mistral Small 3, guidance as an input; the rest is in `flux2`.

From the model card of black-forest-labs/FLUX.2-dev and diffusers' `pipelines/flux2/pipeline_flux2.py`. The guidance that
is trained at is 1: the data as they are.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoProcessor, Mistral3ForConditionalGeneration

from tests.reference import flux2
from tests.reference.common import Recipe, frozen

SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)


def losses(folder: Path, data: Path, recipe: Recipe) -> list[float]:
    text_encoder = frozen(Mistral3ForConditionalGeneration.from_pretrained(folder / "text_encoder"))
    processor = AutoProcessor.from_pretrained(folder / "tokenizer")
    length = min(512, processor.tokenizer.model_max_length)

    # captions, after the system's message, to hidden states 10, 20 and 30 side by side; padding is encoded too
    @cache
    def embed(caption: str) -> torch.Tensor:
        messages = [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
            {"role": "user", "content": [{"type": "text", "text": caption}]},
        ]
        chat = processor.apply_chat_template([messages], add_generation_prompt=False, tokenize=False)[0]
        tokens = processor.tokenizer(
            chat, return_tensors="pt", padding="max_length", truncation=True, max_length=length
        )
        with torch.no_grad():
            hidden = text_encoder(
                input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
            ).hidden_states
        return torch.cat([hidden[10][0], hidden[20][0], hidden[30][0]], dim=-1)

    return flux2.losses(folder, data, recipe, embed, guidance=torch.tensor([1.0]))
