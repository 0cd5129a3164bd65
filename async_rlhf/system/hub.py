"""Names that are a folder's or the hub's: a folder that is missing is said to be so, and not blamed on the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

SECONDS = 10.0
"""To wait for the hub's answer whether it has a name."""


def is_path(source: str) -> bool:
    """Whether it can only be a path: hub names have at most one slash, and do not start with a dot or slash."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def why_nowhere(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why a name that is no folder's is nothing on the hub either; None if the hub, or its cache here, may have it.

    One question without retries, where loading would try for half a minute before it gives up.
    """
    from huggingface_hub import HfApi, constants, errors

    # What the hub's client has fetched, and what datasets has made of it.
    rows = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    fetched = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    if fetched.is_dir() or (kind == "dataset" and (rows / name.replace("/", "___")).is_dir()):
        return None
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=SECONDS)
    except errors.GatedRepoError:
        return None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return f"there is no such folder, and the hub has no such {kind}"
    except errors.OfflineModeIsEnabled:
        return "there is no such folder, and the hub is not asked (HF_HUB_OFFLINE)"
    except (OSError, errors.LocalEntryNotFoundError):
        return "there is no such folder; if it is a name on the hub, that cannot be reached now"
    except Exception as error:  # of the client's own kinds, which differ between its versions
        if "Connect" in type(error).__name__ or "Timeout" in type(error).__name__:
            return "there is no such folder; if it is a name on the hub, that cannot be reached now"
    return None
