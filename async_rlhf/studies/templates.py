"""Templates of the pages that studies write: a file beside their code, which the code fills."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def text_template(study: str, **filters: Any) -> Any:
    """The page.txt of a study. Its filter ``f`` is Python's format.

    Args:
        study: its folder.
        filters: more of them.
    """
    loader = PackageLoader(f"async_rlhf.studies.{study}", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"f": format, **filters}
    return environment.get_template("page.txt")
