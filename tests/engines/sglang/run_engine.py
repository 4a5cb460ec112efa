"""One run of the real engine: `python run_engine.py '{"model_path": ..., ...}'` prints its result as the last line.

The arguments are those of sglang.Engine; the rest is what a CPU without AMX kernels needs. With
enable_return_aux_hidden_states the engine has no drafter, and the result is what each decode step captured.
"""

import json
import sys

PROMPTS = [[5, 6, 7, 8, 9, 10], [40, 41, 42]]
NEW_TOKENS = 16


def main() -> None:
    import sglang

    arguments = json.loads(sys.argv[1])
    prompts = arguments.pop("prompts", PROMPTS)
    defaults = dict(
        device="cpu",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        # The combination that the server does not check against EAGLE and that the sgl_kernel stand-in implements.
        attention_backend="torch_native",
        prefill_attention_backend="intel_amx",
        decode_attention_backend="intel_amx",
        disable_cuda_graph=not arguments.get("enable_torch_compile", False),
        disable_overlap_schedule=True,
        grammar_backend="none",
        chunked_prefill_size=-1,
        # Of the machine's memory: 2 GB that another process takes while the model loads must not count as the model's.
        # The allocation follows max_total_tokens.
        mem_fraction_static=0.5,
        max_total_tokens=2048,
        max_running_requests=4,
        context_length=256,
        log_level="info",
    )
    engine = sglang.Engine(**defaults | arguments)
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    captures = arguments.get("enable_return_aux_hidden_states", False)
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_hidden_states=captures)
    result = [
        {"tokens": output["output_ids"]}
        | (
            {"captured": output["meta_info"]["hidden_states"][1:]}  # without the prompt's
            if captures
            else {"accept_length": NEW_TOKENS / output["meta_info"]["spec_verify_ct"]}
        )
        for output in outputs
    ]
    print("RESULT " + json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
