"""Runs in another Python environment, which has vLLM: reads requests as JSON lines and writes their tokens. Imports no tandem.

Lines in:   {"model": FOLDER, "dtype": "auto", "max_model_len": 2048}, once; then any number of
            {"requests": [{"id": 0, "prompt_ids": [1, 2], "max_tokens": 16, "temperature": 0.8, "top_p": 1.0, "seed": 3,
                           "stop_ids": [2]}, ...]}
Lines out:  {"ready": "0.11.0"}; then for each line of requests
            {"id": 0, "token_ids": [5, 2], "finish": "stop"} for every request, and {"done": 1}.
            {"error": "..."} at any time ends the worker.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Serve until standard input is closed."""
    # vLLM and its libraries print to standard output, so the answers use a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        # Otherwise vLLM computes in a separate process, and its seeds alone do not fix the result.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm  # type: ignore[import-not-found]

        settings = json.loads(sys.stdin.readline())
        model = vllm.LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            trust_remote_code=False,
        )
        answer({"ready": vllm.__version__})
        for line in sys.stdin:
            requests = json.loads(line)["requests"]
            for one in generate(vllm, model, requests):
                answer(one)
            answer({"done": len(requests)})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def generate(vllm: Any, model: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens of each request, including the token that ended it."""
    settings = [
        vllm.SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            top_p=request["top_p"],
            seed=request["seed"],
            stop_token_ids=request["stop_ids"],
            detokenize=False,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    outputs = model.generate(prompts, settings, use_tqdm=False)
    return [
        {
            "id": request["id"],
            "token_ids": list(output.outputs[0].token_ids),
            "finish": output.outputs[0].finish_reason or "length",
        }
        for request, output in zip(requests, outputs, strict=True)
    ]


if __name__ == "__main__":
    main()
