"""Random calls for test_fuzz.py: the structure drawn by hypothesis, every operand between pages that trap, and what
float64 says of the result.

`bench/ops` draws a call, as for `eagle-kernels check`. Here its tensors get other memory (`Guarded`: offsets, gaps
between rows, a forbidden page at one end) and other contents (NaN, Inf, the largest and subnormal numbers in a few
places), lists become one-shot iterables, and `out` sometimes lies in the memory of an input.
"""

import random
from dataclasses import dataclass, field

import torch
from eagle_kernels.bench.ops import entry_of
from eagle_kernels.bench.ops.draw import Draw
from hypothesis import strategies as st
from torch import Tensor

import eagle_kernels as ek
from eagle_kernels.ops.store_context_kv import StoreContextKV
from eagle_kernels.quantized_weight import COMPRESSED, FORMATS
from guards import SENTINEL, between_forbidden_pages
from test_store_context_kv import DTYPES, Form, make

# Sizes for bench/ops to draw from, by name. All are small: a call takes 2 ms on the CPU, and the edge of a block needs
# no more rows.
SIZES = {"T": (0, 1, 2, 3, 7, 16, 33, 70), "N": (0, 1, 2, 5, 33), "H": (1, 7, 16, 31, 64, 100, 130), "V": (5, 64, 130)}
# What may have gaps between rows, and between elements; the other operands are dense by contract.
_ROWS = ("hidden", "residual", "residuals", "chunks", "table", "weight", "out", "out_sum", "sum_squares")
_COLUMNS = ("ids", "sum_squares")
_POSITIONAL = {
    "norm_concat_linear": ("chunks", "weight"),
    "norm_concat": ("chunks",),
    "capture_hidden": ("hidden", "residual"),
    "add_rms_norm": ("hidden", "residual", "weight"),
    "vocab_parallel_embedding": ("ids", "table", "shard"),
}
_PARAMETERS = ("weight", "norm_weight", "bias", "post_norm_weight")
_PLANTED = ("chunks", "residuals", "hidden", "residual", "table")  # operands whose NaN must stay in its row


class HypothesisDraw(Draw):
    """`Draw` whose choices hypothesis makes, replays and shrinks; only the values of tensors come from a seed."""

    def __init__(self, data: st.DataObject, sizes: dict[str, tuple]) -> None:
        self.data, self.sizes = data, sizes
        self.random: random.Random = data.draw(st.randoms(use_true_random=False), label="random")
        seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
        self._generator = torch.Generator().manual_seed(seed)
        self.drawn = {"seed": seed}

    def choose(self, name: str, *values: object) -> object:
        value = self.data.draw(st.sampled_from(self.sizes.get(name, values)), label=name)
        self.drawn[name] = value
        return value

    def width(self) -> int:
        return self.random.choice(self.sizes["H"])

    def rows(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        values = super().rows(rows, columns, dtype)
        if self.random.random() < 0.1:
            values *= torch.finfo(dtype).tiny  # subnormal, most of them
        return values


@dataclass(frozen=True)
class Guarded:
    """A tensor that touches a forbidden page, with gaps between its rows that a call must not change."""

    view: Tensor
    buffer: Tensor  # all of its memory, in one dimension

    @staticmethod
    def of(values: Tensor, gap: int, at: str, poison: float | int) -> "Guarded":
        if values.numel() == 0:
            return Guarded(values, values.new_empty(0))
        columns = values.shape[-1]
        rows = values.numel() // columns
        length = (rows - 1) * (columns + gap) + columns
        buffer = between_forbidden_pages(torch.full((length,), poison, dtype=values.dtype), at)
        view = buffer.as_strided((rows, columns), (columns + gap, 1))
        view = view if values.dim() == 2 else view.view(values.shape)
        view.copy_(values)
        return Guarded(view, buffer)


@dataclass
class Call:
    """One public call. `arguments` are tensors and lists by name; hypothesis prints what `drawn` holds."""

    op: str
    arguments: dict[str, object]
    drawn: dict[str, object]
    overlaps: bool = False  # `out` lies over an input: the call must raise
    read_only: list[Tensor] = field(default_factory=list)  # the memory of every input, gaps included
    outputs: dict[str, Guarded] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(f'{name}={value}' for name, value in self.drawn.items())})"

    def poison_outputs(self) -> None:
        for output in self.outputs.values():
            output.buffer.fill_(SENTINEL)
            output.view.fill_(float("nan"))

    def run(self) -> tuple[Tensor, ...]:
        """The outputs in the order of the op, `sum_squares` of capture_hidden last."""
        arguments = {name: self._form(value) for name, value in self.arguments.items()}
        positional = [arguments.pop(name) for name in _POSITIONAL[self.op]]
        results = getattr(ek, self.op)(*positional, **arguments)
        results = results if isinstance(results, tuple) else (results,)
        if self.op == "vocab_parallel_embedding":
            results = (results[0].flatten(0, -2),)
        squares = self.outputs.get("sum_squares")
        return results if squares is None else (*results, squares.view)

    def _form(self, value: object) -> object:
        return iter(value) if self.drawn.get("one_shot") and isinstance(value, list) else value

    def written_beside_outputs(self) -> bool:
        for output in self.outputs.values():
            inside = torch.zeros(output.buffer.shape, dtype=torch.bool)
            inside.as_strided(output.view.shape, output.view.stride()).fill_(True)
            if (output.buffer[~inside] != SENTINEL).any():
                return True
        return False


def draw_call(op: str, data: st.DataObject, sizes: dict[str, tuple]) -> Call:
    draw = HypothesisDraw(data, SIZES | sizes)
    drawn = entry_of(op).random_call(draw)
    arguments = dict(zip(_POSITIONAL[op], drawn.arguments, strict=True)) | drawn.options
    if isinstance(arguments.get("eps"), float) and draw.choose("no_eps", False, False, False, True):
        arguments["eps"] = 0.0
    if arguments.get("scale") is not None and draw.random.random() < 0.1:
        number = draw.choose("scale", float("nan"), float("inf"))
        scale = arguments["scale"]
        arguments["scale"] = torch.full_like(scale, number) if isinstance(scale, Tensor) else number
    call = Call(op, arguments, draw.drawn)
    if op == "norm_concat_linear":
        _quantize(arguments, draw)
    for name, value in arguments.items():
        if isinstance(value, ek.QuantizedWeight):
            arguments[name] = _place_codes(call, draw, value)
            continue
        entries = value if isinstance(value, list) else [value]
        guarded = [_place(call, draw, name, entry) if isinstance(entry, Tensor) else entry for entry in entries]
        arguments[name] = guarded if isinstance(value, list) else guarded[0]
    if any(isinstance(value, list) for value in arguments.values()):
        draw.choose("one_shot", False, True)
    if call.outputs and draw.choose("out_beside_an_input", False, False, False, True):
        _share_memory(call, draw)
    if "ids" in arguments and draw.choose("ids_in_two_dimensions", False, True):
        _fold_ids(arguments)
    return call


def _quantize(arguments: dict[str, object], draw: HypothesisDraw) -> None:
    """Quantizes the weight in half of the calls, to a format whose blocks fit it, sometimes with one extreme scale."""
    weight = arguments["weight"]
    any_width = [name for name, kind in FORMATS.items() if kind.block[0] != 1 or not kind.block[1]]
    formats = list(FORMATS) if weight.shape[1] % 32 == 0 else any_width
    if weight.dtype == torch.bfloat16:
        formats = [*formats, COMPRESSED]
    format = draw.choose("format", *[None] * len(formats), *formats) if weight.numel() else None
    if format is None:
        return
    quantized = ek.quantize(weight, format)
    if draw.random.random() < 0.2 and format != COMPRESSED:
        scales = quantized.scales.view(torch.uint8) if quantized.scales.itemsize == 1 else quantized.scales
        hard = (0, 0x7F, 0xFF) if quantized.scales.itemsize == 1 else (0.0, float("nan"), float("inf"), 1e-38)
        place, number = draw.random.randrange(scales.numel()), draw.random.choice(hard)
        scales.view(-1)[place] = number
        draw.drawn.setdefault("planted", []).append(("scales", place, number))
    arguments["weight"] = quantized


def _place_codes(call: Call, draw: HypothesisDraw, weight: ek.QuantizedWeight) -> ek.QuantizedWeight:
    """Codes and scales in guarded memory, with NaN in the gaps; 8-bit types are placed as bytes."""
    codes, scales, global_scale = weight.tensors
    placed = []
    for tensor in (codes, scales):
        raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        placed.append(_place(call, draw, "weight", raw).view(tensor.dtype))
    return ek.QuantizedWeight.of_tensors(placed[0], placed[1], global_scale, weight.format, weight.block)


def _place(call: Call, draw: HypothesisDraw, name: str, values: Tensor) -> Tensor:
    """The values in guarded memory."""
    if values.dim() == 0:
        return values
    values = values.clone()
    if name in _PLANTED:
        _plant(draw, values)
    if name in _PARAMETERS and values.is_floating_point() and draw.random.random() < 0.1:
        place, number = draw.random.randrange(values.numel()), draw.random.choice((float("nan"), float("inf")))
        values.view(-1)[place] = number
        draw.drawn.setdefault("planted", []).append((name, place, number))
    is_output = name in ("out", "out_sum") or (name == "sum_squares" and call.op == "capture_hidden")
    is_column = name in _COLUMNS and values.dim() == 1
    gap = draw.random.choice((0, 0, 1, 5, 8)) if is_column or (name in _ROWS and values.dim() >= 2) else 0
    poison = SENTINEL if is_output else float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).max
    at = draw.random.choice(("begin", "end"))
    draw.drawn.setdefault("memory", []).append((name, gap, at))
    guarded = Guarded.of(values.unsqueeze(1) if is_column else values, gap, at, poison)
    if is_column:
        guarded = Guarded(guarded.view[:, 0], guarded.buffer)
    if is_output:
        call.outputs[name] = guarded
    else:
        call.read_only.append(guarded.buffer)
    return guarded.view


def _plant(draw: HypothesisDraw, values: Tensor) -> None:
    """Plants up to three numbers that strain a kernel into half of the operands; a zero fills its whole row."""
    if not values.numel() or draw.random.random() < 0.5:
        return
    finfo = torch.finfo(values.dtype)
    hard = (float("nan"), float("inf"), -float("inf"), finfo.max, finfo.tiny * finfo.eps, -0.0)
    rows = values if values.dim() == 2 else values.view(-1, values.shape[-1])
    for _ in range(draw.random.randrange(1, 4)):
        row, column = draw.random.randrange(rows.shape[0]), draw.random.randrange(rows.shape[1])
        number = draw.random.choice(hard)
        draw.drawn.setdefault("planted", []).append((row, column, number))
        rows[row, column if number else slice(None)] = number


def _share_memory(call: Call, draw: HypothesisDraw) -> None:
    """Puts `out` and a matrix that the op reads into columns of one buffer, overlapping or side by side."""
    name = next(name for name in ("chunks", "hidden", "table") if name in call.arguments)
    value = call.arguments[name]
    read, out = value[0] if isinstance(value, list) else value, call.outputs.get("out")
    if out is None or read.dim() != 2 or out.view.dim() != 2:
        return
    (rows, columns), (out_rows, out_columns) = read.shape, out.view.shape
    begin = draw.choose("out_begins_at", 0, 1, columns - 1, columns, columns + 3)
    width = max(columns, begin + out_columns)
    buffer = Guarded.of(read.new_full((max(rows, out_rows, 1), width), SENTINEL), 0, "end", SENTINEL).view
    shared = buffer[:rows, :columns].copy_(read)
    if isinstance(value, list):
        value[0] = shared
    else:
        call.arguments[name] = shared
    call.arguments["out"] = view = buffer[:out_rows, begin : begin + out_columns]
    call.overlaps = begin < columns and rows > 0 and view.numel() > 0
    call.read_only.append(buffer if call.overlaps else shared)
    del call.outputs["out"]  # what surrounds it is an input


def _fold_ids(arguments: dict[str, object]) -> None:
    ids, out = arguments["ids"], arguments.get("out")
    if ids.numel() and ids.numel() % 2 == 0:
        arguments["ids"] = ids.view(2, -1)
        if out is not None:
            arguments["out"] = out.view(2, -1, out.shape[1])


def draw_store(data: st.DataObject) -> StoreContextKV:
    """A record of store_context_kv whose operands, gaps included, touch forbidden pages; the caches hold NaN."""

    def choose(name: str, *values: object) -> object:
        return data.draw(st.sampled_from(values), label=name)

    d = choose("d", 1, 2, 7, 16, 33, 64, 130)
    norm_width = choose("norm_width", d, d, d, d // 2, 0)
    rotary_begin = choose("rotary_begin", 0, 0, d // 3)
    form = Form(
        choose("n", 1, 2, 3),
        d,
        2 * data.draw(st.integers(0, (d - rotary_begin) // 2), label="pairs"),
        norm_width,
        choose("v", "own", "k", "none"),
        choose("gain", "dtype", "fp32", "none") if norm_width else "none",
        choose("norm_offset", 0.0, 1.0),
        rotary_begin,
        choose("interleaved", False, True),
        choose("eps", 1e-6, 0.3, 0.0),
    )
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    index = choose("index", torch.int32, torch.int64)
    record = make(form, choose("dtype", *DTYPES), choose("N", 0, 1, 2, 5, 33), index)
    if record.kv.numel() and choose("planted", False, True):
        number = choose("number", 0.0, float("nan"), float("inf"))
        place = data.draw(st.integers(0, record.kv.numel() - 1), label="place")
        record.kv[place // record.kv.shape[1], place % record.kv.shape[1]] = number
    at = choose("at", "begin", "end")
    return StoreContextKV(*(_all_memory_of(value, at) if isinstance(value, Tensor) else value for value in record))


def _all_memory_of(tensor: Tensor, at: str) -> Tensor:
    """The tensor with the gaps between its rows, in memory that touches a forbidden page."""
    if tensor.numel() == 0:
        return tensor
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = between_forbidden_pages(tensor.as_strided((length,), (1,)), at)
    return memory.as_strided(tensor.shape, tensor.stride())
