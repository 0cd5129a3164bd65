"""See vllm/__init__.py."""

from dataclasses import dataclass


@dataclass
class LoRARequest:
    """An adapter in a folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
