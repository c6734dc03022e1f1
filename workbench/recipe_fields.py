"""Recipe fields: the types that all sections of a recipe are made of.

Types are strict (a quoted number is not a number), unknown keys are refused, a recipe is frozen, and what stands under
a field is its documentation. Not here: the sections (`workbench.recipe_schema`, `workbench.recipe_training`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# The mark of a value that the final recipe must fill; OmegaConf's own.
MISSING = "???"
# What may name a recipe and a run: it becomes a directory and the first part of every rollout id.
RUN_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}$"
# Ray's client (ray://) is no choice: handles made by it cannot be awaited in the driver's event loop.
RAY_ADDRESS = r"^(local|auto|[A-Za-z0-9._-]+:[0-9]{1,5})$"

Dtype = Literal["bfloat16", "float32"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """Base of all sections: strict types, unknown keys refused, frozen, docs taken from under the fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
