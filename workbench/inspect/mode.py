"""Mode: whether an inspector shows itself live, as a snapshot, or both.

`live`: a widget, while a kernel runs. `static`: picture and text, for good. `both` (the default): the widget, and
under it the snapshot for readers without a kernel, which JupyterLab folds away while the widget is there.
Said by `set_mode`, else by the environment variable `WORKBENCH_DISPLAY`; the campaign runner says `static`.
"""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

Mode = Literal["live", "static", "both"]
VARIABLE = "WORKBENCH_DISPLAY"
_MODES = get_args(Mode)
_chosen: Mode | None = None


def set_mode(mode: Mode | None) -> None:
    """Choose how inspectors show themselves from now on; None goes back to the environment's word."""
    global _chosen
    _chosen = None if mode is None else _checked(mode, "set_mode")


def display_mode() -> Mode:
    """The mode in force."""
    return _chosen or _checked(os.environ.get(VARIABLE) or "both", VARIABLE)


def _checked(mode: str, origin: str) -> Mode:
    if mode not in _MODES:
        raise ValueError(f"{origin}: expected one of {', '.join(_MODES)}, got {mode!r}")
    return cast(Mode, mode)
