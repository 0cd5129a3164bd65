"""Templates of the texts that studies print: a file beside their code, which the code fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def filled(study: str, values: Mapping[str, Any], page: str = "page.txt", /, **filters: Any) -> str:
    """The page of a study with these values, without an empty line at its end.

    Its filters are ``f``, which is Python's format, and ``count``, a number with the word for so many.

    Args:
        study: its folder.
        values: by name.
        page: the file.
        filters: more of them.
    """
    loader = PackageLoader(f"async_rlhf.studies.{study}", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"f": format, "count": count, **filters}
    return environment.get_template(page).render(values).rstrip("\n")


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with the word for so many: 1 batch, 2 batches."""
    return f"{number} {one if number == 1 else many or one + 's'}"
