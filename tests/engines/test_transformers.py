"""Captures from real transformers models equal what the models themselves report, bit for bit, at every boundary."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_kernels as ek
from eagle_kernels import buffers
from guards import same_bits

transformers = pytest.importorskip("transformers")

from eagle_kernels.engines.transformers import capture  # noqa: E402
from tiny_models import LAYERS, MODELS, VOCABULARY, H, build, deepseek_v4, gemma3n, randomise  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/transformers.md"
BATCH, LENGTH = 2, 7
ROWS = BATCH * LENGTH


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build(request.param)


@pytest.fixture(scope="module")
def gemma3() -> torch.nn.Module:
    return build("gemma3")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_ids(batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def reported(model: torch.nn.Module, ids: torch.Tensor, cache: object = None) -> list[torch.Tensor]:
    """The states at every boundary as the model reports them; its own list has the last one only after the norm."""
    before_norm = []
    norm = model.get_decoder().norm
    hook = norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0].clone()))
    # By position: from transformers 5.24 on past_key_values is named cache.
    states = list(model(ids, None, None, cache, output_hidden_states=True).hidden_states)
    hook.remove()
    assert torch.equal(norm(before_norm[0]), states[-1])
    return [*states[:-1], before_norm[0]]


def test_every_boundary_equals_output_hidden_states(model: torch.nn.Module) -> None:
    ids, buffer = random_ids(), ek.AuxHiddenStates(ROWS + 3, LAYERS + 1, H)
    with capture(model, range(LAYERS + 1), buffer):
        states = reported(model, ids)
    for boundary, state in enumerate(states):
        assert same_bits(buffer.chunk(boundary, ROWS).view(BATCH, LENGTH, H), state), boundary
        squares = state.double().square().sum(-1).flatten()
        torch.testing.assert_close(buffer.row_sum_squares(ROWS)[:, boundary].double(), squares, rtol=1e-5, atol=0)
    assert not buffer.buffer[ROWS:].any()


@pytest.mark.parametrize("boundaries", [[0], [LAYERS], [LAYERS, 0, 2]], ids=str)
def test_slots_take_any_boundaries_in_any_order(gemma3: torch.nn.Module, boundaries: list[int]) -> None:
    model, ids, buffer = gemma3, random_ids(), ek.AuxHiddenStates(ROWS, len(boundaries), H)
    with capture(model, boundaries, buffer):
        states = reported(model, ids)
    for k, boundary in enumerate(boundaries):
        assert same_bits(buffer.chunk(k, ROWS).view(BATCH, LENGTH, H), states[boundary])


def test_a_chunked_prefill_and_decoding_share_one_buffer(gemma3: torch.nn.Module) -> None:
    boundaries, buffer = [1, 3, LAYERS], ek.AuxHiddenStates(2048 + 512, 3, H)
    ids, cache = random_ids(1, 2048 + 300 + 2), transformers.DynamicCache(config=gemma3.config)
    expected = buffer.buffer.clone()
    # The last chunk of the prefill is ragged; a decode step then overwrites the first rows.
    for begin, stop, row in ((0, 2048, 0), (2048, 2348, 2048), (2348, 2350, 0)):
        with capture(gemma3, boundaries, buffer, row=row):
            states = reported(gemma3, ids[:, begin:stop], cache)
        expected[row : row + stop - begin] = torch.cat([states[boundary][0] for boundary in boundaries], -1)
        assert same_bits(buffer.buffer, expected)


@pytest.fixture
def read_addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The address of each tensor given to capture_hidden."""
    addresses, original = [], buffers.capture_hidden

    def capture_hidden(hidden: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        addresses.append(hidden.data_ptr())
        return original(hidden, *args, **options)

    monkeypatch.setattr(buffers, "capture_hidden", capture_hidden)
    return addresses


def test_states_are_read_where_the_model_has_them(gemma3: torch.nn.Module, read_addresses: list[int]) -> None:
    inputs = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].data_ptr()))
        for layer in gemma3.model.layers
    ]
    with capture(gemma3, range(LAYERS), ek.AuxHiddenStates(ROWS, LAYERS, H)):
        gemma3(random_ids())
    for hook in hooks:
        hook.remove()
    assert read_addresses == inputs


def test_a_batch_without_a_flat_view_is_captured_without_a_copy(
    gemma3: torch.nn.Module, read_addresses: list[int]
) -> None:
    """Embeddings expanded over the batch, or cut along the sequence, have no [B*S, H] view."""
    whole = torch.randn(BATCH, LENGTH + 2, H).bfloat16()
    for embeds in (whole[:1].expand(BATCH, -1, -1), whole[:, 2:]):
        assert not embeds.is_contiguous()
        read_addresses.clear()
        buffer = ek.AuxHiddenStates(BATCH * (LENGTH + 2), 1, H)
        with capture(gemma3, [0], buffer):
            gemma3(inputs_embeds=embeds)
        assert same_bits(buffer.packed(embeds.shape[:-1].numel()).view(embeds.shape), embeds.contiguous())
        assert read_addresses == [sequence.data_ptr() for sequence in embeds]


def compiled(model: torch.nn.Module, how: str) -> torch.nn.Module:
    if how == "in-place":
        model.compile(backend="eager")
        return model
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(("how", "captured"), [("wrapped", "wrapper"), ("wrapped", "model"), ("in-place", "model")])
def test_a_model_that_was_compiled_before_is_captured(how: str, captured: str) -> None:
    """Its graph has no hooks and no guard on them: the buffer silently kept what it had."""
    torch._dynamo.reset()
    model, ids = build("gemma3"), random_ids()
    states = reported(build("gemma3"), ids)  # after a hook on its own norm, Dynamo would notice the next ones
    called, buffer = compiled(model, how), ek.AuxHiddenStates(ROWS, 2, H)
    called(ids)
    with capture(called if captured == "wrapper" else model, [1, LAYERS], buffer):
        called(ids)
    for k, boundary in enumerate((1, LAYERS)):
        assert same_bits(buffer.chunk(k, ROWS).view(BATCH, LENGTH, H), states[boundary])
    before = buffer.buffer.clone()
    called(random_ids())
    assert same_bits(buffer.buffer, before)


def test_captures_that_overlap_leave_compiled_models_as_they_were() -> None:
    """torch's stance is the process's: the first to leave ended it for the other, which then put it back for good."""
    torch._dynamo.reset()
    model, ids = build("gemma3"), random_ids()
    called, buffers = compiled(model, "wrapper"), [ek.AuxHiddenStates(ROWS, 1, H) for _ in range(2)]
    called(ids)
    first, second = (capture(model, [k + 1], buffer) for k, buffer in enumerate(buffers))
    with contextlib.ExitStack() as of_second:
        with first:
            of_second.enter_context(second)
        called(ids)
        assert not buffers[0].buffer.any()
    assert same_bits(buffers[1].chunk(0, ROWS).view(BATCH, LENGTH, H), reported(build("gemma3"), ids)[2])
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_capture_inside_of_a_compiled_function() -> None:
    """torch refuses to change its stance there."""
    torch._dynamo.reset()
    model, ids, buffer = build("gemma3"), random_ids(), ek.AuxHiddenStates(ROWS, 1, H)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with capture(model, [1], buffer):
            model(ids)
        return y * 2

    for _ in range(2):
        buffer.buffer.zero_()
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))
        assert same_bits(buffer.chunk(0, ROWS).view(BATCH, LENGTH, H), reported(build("gemma3"), ids)[1])


def test_of_residual_streams_the_mean_is_captured() -> None:
    """The rows of all streams followed each other, so that a drafter would have read a quarter of the tokens."""
    streams, boundaries = [], [0, 2, LAYERS]
    torch.manual_seed(0)
    model = randomise(deepseek_v4()).bfloat16().eval()
    ids, buffer = random_ids(), ek.AuxHiddenStates(ROWS, len(boundaries), H)
    hooks = [layer.register_forward_pre_hook(lambda _, args: streams.append(args[0])) for layer in model.model.layers]
    hooks.append(model.model.layers[-1].register_forward_hook(lambda _, args, output: streams.append(output)))
    with capture(model, boundaries, buffer):
        model(ids, use_cache=False)
    for k, boundary in enumerate(boundaries):
        assert streams[boundary].shape == (BATCH, LENGTH, model.config.hc_mult, H)
        expected = streams[boundary].float().mean(2).bfloat16()
        assert same_bits(buffer.chunk(k, ROWS).view(BATCH, LENGTH, H), expected), boundary


def test_states_of_another_form_are_refused() -> None:
    """Gemma 3n's layers hand on four predictions, [4, B, S, H]; the buffer got those of all as rows."""
    model, buffer = gemma3n().bfloat16().eval(), ek.AuxHiddenStates(4 * ROWS, 1, H)
    message = "transformers.capture: boundary 1 has shape (4, 2, 7, 64), expected [B, S, H]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(model, [1], buffer)
    assert not buffer.buffer.any()


def hooks_of(model: torch.nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


def test_the_model_is_restored_on_exit(model: torch.nn.Module) -> None:
    model(random_ids(), output_hidden_states=True)  # the first call sets hooks of transformers' own
    buffer, before = ek.AuxHiddenStates(ROWS, 2, H), hooks_of(model)
    with capture(model, [0, LAYERS], buffer):
        assert hooks_of(model) != before
    assert hooks_of(model) == before
    with pytest.raises(ZeroDivisionError), capture(model, [0, LAYERS], buffer):
        raise ZeroDivisionError
    assert hooks_of(model) == before
    model(random_ids())
    assert not buffer.buffer.any()


def test_a_forward_that_fails_does_not_spoil_the_next(gemma3: torch.nn.Module) -> None:
    ids, buffer = random_ids(), ek.AuxHiddenStates(ROWS, 2, H)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with capture(gemma3, [0, LAYERS], buffer):
        broken = gemma3.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            gemma3(ids)
        broken.remove()
        states = reported(gemma3, ids)
    assert same_bits(buffer.chunk(1, ROWS).view(BATCH, LENGTH, H), states[LAYERS])


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        pytest.param([0, 5], "transformers.capture: boundary is 5, expected one in [0, 4]", id="above-N"),
        pytest.param([-1, 0], "transformers.capture: boundary is -1, expected one in [0, 4]", id="negative"),
        pytest.param(
            [1],
            "transformers.capture: boundaries is [1], expected 2 of them, because the buffer has that many slots",
            id="count",
        ),
        pytest.param(
            [3, 3],
            "transformers.capture: boundaries is [3, 3], expected each boundary once, because two slots would hold the "
            "same states",
            id="twice",
        ),
        pytest.param(
            list(torch.tensor([1, 1])),
            "transformers.capture: boundaries is [1, 1], expected each boundary once, because two slots would hold the "
            "same states",
            id="twice-in-tensors",
        ),
        pytest.param(["a", 1], "transformers.capture: boundaries[0] is a str, expected an int", id="str"),
        pytest.param([[1], [2]], "transformers.capture: boundaries[0] is a list, expected an int", id="lists"),
        pytest.param(None, "transformers.capture: boundaries is a NoneType, expected a sequence of ints", id="none"),
        pytest.param(5, "transformers.capture: boundaries is a int, expected a sequence of ints", id="int"),
    ],
)
def test_bad_boundaries_set_no_hook(gemma3: torch.nn.Module, boundaries: Any, message: str) -> None:
    buffer, before = ek.AuxHiddenStates(8, 2, H), hooks_of(gemma3)
    raises = pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$")
    with raises, capture(gemma3, boundaries, buffer):
        pass
    assert hooks_of(gemma3) == before


def test_boundaries_may_be_any_ints_and_are_read_once(gemma3: torch.nn.Module) -> None:
    captured = [ek.AuxHiddenStates(8, 2, H) for _ in range(3)]
    ids = random_ids(1, 3)
    for buffer, boundaries in zip(captured, ([0, 2], torch.tensor([0, 2]), (k for k in (0, 2))), strict=True):
        with capture(gemma3, boundaries, buffer):
            gemma3(ids)
    assert captured[0].buffer.any() and all(same_bits(each.buffer, captured[0].buffer) for each in captured)


def test_a_buffer_of_another_type_is_refused(gemma3: torch.nn.Module) -> None:
    message = "^transformers.capture: buffer is a NoneType, expected an AuxHiddenStates$"
    with pytest.raises(TypeError, match=message), capture(gemma3, [0], None):
        pass


def test_a_model_without_decoder_layers_is_refused() -> None:
    message = "transformers.capture: model is a Linear, expected a transformers model whose get_decoder() has layers"
    with pytest.raises(TypeError, match=re.escape(message)), capture(torch.nn.Linear(1, 1), [0], None):
        pass


def run(model: torch.nn.Module, boundaries: list[int], buffer: ek.AuxHiddenStates, **call: object) -> None:
    with capture(model, boundaries, buffer):
        model(**({"input_ids": random_ids()} | call))


def test_too_many_rows_leave_the_buffer_untouched(gemma3: torch.nn.Module) -> None:
    buffer = ek.AuxHiddenStates(ROWS - 1, 2, H)
    message = "AuxHiddenStates.step: the rows end at 14, expected at most max_tokens = 13, because static buffers never"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(gemma3, [0, 2], buffer)
    assert not buffer.buffer.any() and not buffer.sum_squares.any()


def test_a_layer_that_runs_twice_is_an_error() -> None:
    model = build("gemma3")
    model.model.layers[1] = model.model.layers[0]
    message = "CaptureStep.capture: slot 0 gets rows [14, 28), expected each of the step's 14 rows once"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        run(model, [0, 2], ek.AuxHiddenStates(4 * ROWS, 2, H))


def test_a_layer_that_never_runs_is_an_error() -> None:
    model = build("gemma3")
    model.config.num_hidden_layers = 2
    message = (
        "CaptureStep.finish: slot 1 has 0, expected 14 rows in each, because the layers in front of those boundaries "
        "did not run, or not for all rows"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        run(model, [1, 4], ek.AuxHiddenStates(ROWS, 2, H))
    message = "transformers.capture: no boundary was reached, expected [3] in each forward"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        run(model, [3], ek.AuxHiddenStates(ROWS, 1, H))


def test_rows_that_a_model_drops_on_the_way_are_an_error() -> None:
    """Gemma 4 computes its KV-shared layers for the prompt's last rows only, unless all states are requested."""
    message = (
        "transformers.capture: boundary 2 has 2 rows, expected 14, because an earlier boundary has that many "
        "(logits_to_keep cuts rows in front of KV-shared layers)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(build("gemma4_shared_kv"), [0, 2], ek.AuxHiddenStates(ROWS, 2, H), logits_to_keep=1)


def test_training_is_refused(gemma3: torch.nn.Module) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        ids = torch.randint(VOCABULARY, (1, 3))
        with pytest.raises(RuntimeError, match="inference only"):
            run(gemma3, [1], ek.AuxHiddenStates(8, 1, H), input_ids=ids)


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block-{k}" for k in range(len(BLOCKS))])
def test_each_block_of_the_page_runs_by_itself(block: str, tmp_path: Path) -> None:
    """And prints what the comments after its prints say."""
    if "from kernels " in block:
        pytest.importorskip("kernels")
    run = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for expected in re.findall(r"^ *print\(.*\)  # (.*?)(?:\.\.\.)?$", block, re.MULTILINE):
        assert expected in run.stdout
