"""The server's endpoints that runs use: see vllm/__init__.py."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from vllm import LLM, SamplingParams


class Served:
    """One engine, whose steps a thread takes while anybody waits.

    Args:
        words: arguments of the server.
    """

    def __init__(self, words: dict[str, Any]) -> None:
        self.llm, self.label, self.paused = LLM(**words), "default", False
        self.lock, self.finished, self.names = threading.Condition(), dict[str, Any](), 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self.lock:
                if not self.paused:
                    try:
                        outputs = self.llm.llm_engine.step()
                    except Exception:
                        traceback.print_exc()
                        os._exit(1)  # as vLLM's server ends with its engine
                    self.finished |= {output.request_id: output for output in outputs}
                    self.lock.notify_all()
            time.sleep(0.002)

    def generate(self, fields: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.names += 1
            name, params = str(self.names), SamplingParams(**fields["sampling_params"])
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": fields["token_ids"]}, params)
            self.lock.wait_for(lambda: name in self.finished)
            output = self.finished.pop(name)
        choices = [
            {
                "index": row.index,
                "finish_reason": row.finish_reason,
                "token_ids": row.token_ids,
                "logprobs": {"content": [{"logprob": score} for score in row.scores]},
                "weight_versions": [vars(span) for span in row.weight_versions],
            }
            for row in output.outputs
        ]
        told = output.prompt_logprobs and [
            each and {str(token): vars(found) for token, found in each.items()} for each in output.prompt_logprobs
        ]
        return {"choices": choices, "prompt_logprobs": told}

    def post(self, path: str, fields: Any) -> Any:
        if path == "/inference/v1/generate":
            return self.generate(fields)
        with self.lock:
            if path == "/collective_rpc":
                return {"results": self.llm.collective_rpc(fields["method"], tuple(fields.get("args", ())))}
            if path == "/update_weight_version":
                self.label = fields["new_version"]
                self.llm.llm_engine.set_weight_version(self.label)
            elif path in ("/pause", "/resume"):
                self.paused = path == "/pause"
            elif path != "/reset_prefix_cache":
                raise LookupError(path)
        return {"success": True}

    def get(self, path: str) -> Any:
        answers = {"/health": {}, "/version": {"version": "0.32.0"}, "/weight_info": {"weight_version": self.label}}
        return answers[path]


class Handler(BaseHTTPRequestHandler):
    """HTTP in front of it."""

    served: Served
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(lambda path, body: self.served.get(path))

    def do_POST(self) -> None:
        self._answer(lambda path, body: self.served.post(path, json.loads(body or b"{}")))

    def _answer(self, compute: Any) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = os.environ.get("VLLM_API_KEY")
        right = key is None or self.path == "/health" or self.headers.get("Authorization") == f"Bearer {key}"
        if not right:
            status, answer = 401, {"error": {"message": "Unauthorized"}}
        else:
            try:
                status, answer = 200, compute(urlsplit(self.path).path, body)
            except LookupError as error:
                status, answer = 404, {"error": {"message": str(error)}}
            except Exception as error:
                status, answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        """Say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = {"port": int, "seed": int, "max-model-len": int, "tensor-parallel-size": int, "kv-cache-memory-bytes": int}
    kinds |= dict.fromkeys(("model", "host", "dtype", "logprobs-mode", "worker-extension-cls"), str)
    for name, kind in {**kinds, "gpu-memory-utilization": float}.items():
        parser.add_argument(f"--{name}", type=kind)
    known, _ = parser.parse_known_args()
    words = {name: value for name, value in vars(known).items() if value is not None}
    host, port = words.pop("host"), words.pop("port")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    Handler.served = Served(words)
    ThreadingHTTPServer((host, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
