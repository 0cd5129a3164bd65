"""What generator processes and servers import, for the process that they are forks of."""

import gc

import vllm.entrypoints.llm
import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.transformers.causal
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401

import async_rlhf.generation.vllm_engine  # noqa: F401

gc.freeze()  # vLLM looks for garbage five times as it starts: no need to look in here
