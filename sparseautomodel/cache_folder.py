"""Where what was measured or compiled on this machine is kept for later processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder that `SPARSEAUTOMODEL_CACHE` names, `~/.cache/sparseautomodel` else; it may not be there yet.

    Raises OSError where there is no place for it.
    """
    given = os.environ.get("SPARSEAUTOMODEL_CACHE")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache" / "sparseautomodel"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise FileNotFoundError("no home") from error
