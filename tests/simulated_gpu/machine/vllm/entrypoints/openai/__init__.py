"""See vllm/__init__.py."""
