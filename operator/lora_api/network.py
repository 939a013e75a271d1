"""`spec.config.network`: what is trained, and how.

One type, rank and alpha for all layers, unless a rule of `modules` says otherwise for some of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lora_api.base import Native
from lora_api.locations import Line, ModelLocation

MAX_RANK = 9_999_999_999  # what "full rank" means to tools that need a number


class ModuleRule(Native):
    """Another treatment for some layers. The first rule whose pattern matches a layer decides; the rest stay as `network` says."""

    match: Annotated[Line, Field(min_length=1, max_length=256)] = Field(
        description="Pattern of full dotted layer names (`*`, `?`, `[..]`), with or without `transformer.` in front, such "
        "as `transformer_blocks.*.attn.*`. It chooses among the layers that would be trained without it."
    )
    type: Literal["lora", "lokr", "loha", "dora"] | None = Field(
        None, description="Adapter type of these layers. Left out: `network.type`."
    )
    linear: int | None = Field(
        None, ge=1, le=4096, description="Rank of these linear layers. Left out: `network.linear`."
    )
    linear_alpha: float | None = Field(
        None,
        gt=0,
        le=65536,
        description="Alpha of these linear layers. Left out: the rank where the rule sets `linear`, else as in `network`.",
    )
    lr: float | None = Field(
        None,
        gt=0,
        le=10,
        description="Learning rate of these layers. A change of `train.lr` while training scales it in proportion.",
    )
    freeze: bool = Field(
        False, description="Leave these layers as they are: as `network.init_from` made them, or as in the base model."
    )

    @model_validator(mode="after")
    def _frozen_layers_have_no_settings(self) -> ModuleRule:
        if self.freeze and any(value is not None for value in (self.type, self.linear, self.linear_alpha, self.lr)):
            raise ValueError(
                "freeze: true leaves nothing to set; remove type, linear, linear_alpha and lr from this rule"
            )
        return self


class NetworkConfig(Native):
    """What is trained. DeltaW is scaled by alpha / rank for every family and type."""

    type: Literal["lora", "lokr", "loha", "dora", "full"] = Field(
        "lora", description="Adapter type; `full` trains the weights of the denoiser themselves."
    )
    linear: int = Field(16, ge=1, le=4096, description="Rank for linear layers.")
    linear_alpha: float | None = Field(
        None, gt=0, le=65536, description="Alpha for linear layers; the scale is alpha / rank. Left out: the rank."
    )
    conv: int | None = Field(
        None, ge=1, le=4096, description="Rank for convolutions, where the family has them. Left out: none are trained."
    )
    conv_alpha: float | None = Field(None, gt=0, le=65536, description="Alpha for convolutions. Left out: `conv`.")
    lokr_full_rank: bool = Field(
        True, description="LoKr only: keep the second factor whole. Rank and alpha then play no part (scale 1)."
    )
    lokr_factor: int = Field(
        -1, ge=-1, le=4096, description="LoKr only: size of the first Kronecker factor; -1 takes the most even split."
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="LoRA and DoRA only: dropout before the down projection.")
    only_if_contains: tuple[Line, ...] = Field(
        (), max_length=64, description="Train only layers whose dotted name contains one of these."
    )
    ignore_if_contains: tuple[Line, ...] = Field(
        (), max_length=64, description="Skip layers whose dotted name contains one of these; wins over the other list."
    )
    modules: tuple[ModuleRule, ...] = Field(
        (),
        max_length=64,
        description="Other types, ranks or rates for some layers; the first rule that matches decides.",
    )
    init_from: ModelLocation | None = Field(
        None,
        description="Adapter file (.safetensors) to begin with: a local path, s3://bucket/key in a store of the "
        "profile, or hf://org/repo/file. Other tools' key names are understood; the change it makes is kept as exactly as the new rank allows.",
    )

    @model_validator(mode="after")
    def _factor_is_not_zero(self) -> NetworkConfig:
        if self.lokr_factor == 0:
            raise ValueError("lokr_factor: 0 is neither -1 (most even split) nor a factor of at least 1")
        return self

    @model_validator(mode="after")
    def _dropout_has_a_meaning(self) -> NetworkConfig:
        types = {self.type, *(rule.type for rule in self.modules if rule.type is not None)}
        if self.dropout and not types <= {"lora", "dora"}:
            raise ValueError(
                f"dropout: {self.dropout} is for lora and dora only, but {', '.join(sorted(types - {'lora', 'dora'}))} is "
                "trained too; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _ranks_have_a_meaning(self) -> NetworkConfig:
        if self.lokr_full_rank and any(
            (rule.type or self.type) == "lokr" and (rule.linear is not None or rule.linear_alpha is not None)
            for rule in self.modules
        ):
            raise ValueError(
                "lokr_full_rank: true, and a rule in modules sets linear or linear_alpha for lokr, which would play no "
                "part; set it to false"
            )
        return self

    @model_validator(mode="after")
    def _full_has_no_ranks(self) -> NetworkConfig:
        if self.type == "full" and any(
            value is not None for rule in self.modules for value in (rule.type, rule.linear, rule.linear_alpha)
        ):
            raise ValueError(
                "modules: type, linear and linear_alpha of a rule mean nothing with network.type full; remove them"
            )
        return self
