"""Step-3.5 and its successor Step-3.7: gains 1 + w everywhere, three MTP layers in a chain.

Layer 0 reads the target's pre-norm hidden state, layer k the pre-norm output (hidden + residual) of layer k - 1; rows
stay where they are, token ids rotate by one (`ChainedHiddenStates`, `rotate_token_ids`). SGLang 0.5.23
`step3p5_mtp.py` and `multi_layer_eagle_worker_v2.py`, vLLM 0.33 `step3p5_mtp.py`; neither zeroes position 0, and
neither captures layers of this target for EAGLE-3. transformers 5.23 `MtpModel` hands on the normed output instead
(`norm_output`), for Step-3.7 as for every model.
"""

from .family import ModelFamily, MTPStage

STEP3P5 = ModelFamily(
    name="step3p5",
    model_types=("step3p5", "step3p7"),
    norm_offset=1.0,
    mtp=MTPStage(chained=True),
    shapes=(
        {
            "name": "step3.5-flash",
            "target_hidden_size": 4096,
            "num_layers": 45,
            "vocab_size": 128896,
            "rms_norm_eps": 1e-5,
            "mtp": {"num_chunks": 2, "layers": 3},
        },
    ),
)

FAMILIES = (STEP3P5,)
