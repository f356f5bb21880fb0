"""What every part of a recipe is: frozen, strict, closed. Owns the ranges that fields share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
"""Of what a Plan lists one by one (devices, engines, rollouts of a step): more would fill the memory of the laptop that
resolves it."""
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NativeOptions = dict[str, Any]
"""An engine's own options under the engine's own names."""


class Section(BaseModel):
    """Base of every part of a recipe: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)
