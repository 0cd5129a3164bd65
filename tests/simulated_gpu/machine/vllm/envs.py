"""See vllm/__init__.py."""

environment_variables: dict[str, object] = {}


def disable_envs_cache() -> None:
    """Nothing is kept."""
