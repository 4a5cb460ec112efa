"""One engine from start to end in a process of its own: `python run_engine.py request.json` prints one line of JSON.

The request: target, drafter, num_speculative_tokens, tp, compiled, prompts, max_tokens, update (see `update_fc`).
"""

import json
import sys
from pathlib import Path

MARK = "RESULT "


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    options = request.get("options", {})
    llm = LLM(
        model=request["target"],
        speculative_config={
            "method": request.get("method", "eagle3"),
            "model": request["drafter"],
            "num_speculative_tokens": request["num_speculative_tokens"],
        },
        tensor_parallel_size=request["tp"],
        enforce_eager=not request["compiled"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=4,
        disable_log_stats=False,
        seed=0,
        **options,
    )
    results = []
    for update in [None, *request.get("updates", [])]:
        if update is not None:
            llm.collective_rpc(update_fc, args=(update,))
        results.append(generate(llm, SamplingParams, request))
    print(MARK + json.dumps(results), flush=True)


def generate(llm: object, SamplingParams: type, request: dict) -> dict:
    before = accepted_tokens(llm)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in request["prompts"]],
        SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    drafts, accepted = (now - then for now, then in zip(accepted_tokens(llm), before, strict=True))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {"tokens": tokens, "accepted_length": 1 + accepted / max(drafts, 1)}


def accepted_tokens(llm: object) -> tuple[float, float]:
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    return values.get("vllm:spec_decode_num_drafts", 0.0), values.get("vllm:spec_decode_num_accepted_tokens", 0.0)


def update_fc(worker: object, scale: float) -> None:
    """What an RL trainer does to a running drafter: its fc gets other values in place."""
    drafter = worker.model_runner.drafter.model
    parameter = drafter.model.fc.weight
    parameter.data.mul_(scale)


if __name__ == "__main__":
    main()
