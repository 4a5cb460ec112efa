"""One engine from start to end in a process of its own: `python vllm_run.py request.json` prints one line of JSON.

The request has target, drafter, num_speculative_tokens, tp, compiled, prompts, max_tokens, `engine` (more arguments of
LLM), `sampling` (arguments of SamplingParams) and `updates` of the drafter's weights; the prompts run again after each
update.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["target"],
        speculative_config={
            "method": request.get("method", "eagle3"),
            "num_speculative_tokens": request["num_speculative_tokens"],
        }
        | ({"model": request["drafter"]} if "drafter" in request else {}),
        tensor_parallel_size=request["tp"],
        enforce_eager=not request["compiled"],
        load_format=request.get("load_format", "auto"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        disable_log_stats=False,
        seed=0,
        **{"max_model_len": 128, "max_num_seqs": 4} | request.get("engine", {}),
    )
    chosen = {"temperature": 0.0} | request["sampling"]
    sampling = SamplingParams(max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True, **chosen)
    results = [generate(llm, sampling, request["prompts"])]
    for update in request.get("updates", []):
        llm.collective_rpc(update_weights, args=(update,))
        results.append(generate(llm, sampling, request["prompts"]))
    print("\nRESULT " + json.dumps(results), flush=True)


def generate(llm: object, sampling: object, prompts: list[list[int]]) -> dict:
    before = drafts_and_accepted(llm)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    drafts, accepted = (now - then for now, then in zip(drafts_and_accepted(llm), before, strict=True))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {"tokens": tokens, "accepted_length": 1 + accepted / drafts}


def drafts_and_accepted(llm: object) -> tuple[float, float]:
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    return values.get("vllm:spec_decode_num_drafts", 0.0), values.get("vllm:spec_decode_num_accepted_tokens", 0.0)


def update_weights(worker: object, update: dict[str, tuple[float, int]]) -> None:
    """What a trainer does to a running drafter: new values through the model's own load_weights. Here each weight is
    multiplied by a factor, and its rows are rolled by a number."""
    import torch

    drafter = worker.model_runner.drafter.model
    weights = dict(drafter.named_parameters())
    with torch.no_grad():
        new = [(name, (weights[f"model.{name}"] * factor).roll(rows, 0)) for name, (factor, rows) in update.items()]
        drafter.load_weights(new)


if __name__ == "__main__":
    main()
