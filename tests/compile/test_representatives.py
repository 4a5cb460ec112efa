"""What the gate compiles by default stands for all of it: every kernel, arch, plan, edge of a plan and operand type."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest

from compile import test_memory_ops as memory_ops
from compile import test_norm_concat_linear as linear
from compile.offline import ARCHS, Arch, Launch
from compile.representatives import representatives

GATES: dict[str, Callable[[Arch], Mapping[str, Launch]]] = {
    **{op: lambda arch, op=op: memory_ops.launches_by_case(op, arch) for op in memory_ops.OPS},
    "norm_concat_linear-presets": lambda arch: linear.distinct_launches(linear.preset_calls(arch)),
    "norm_concat_linear-features": lambda arch: linear.distinct_launches(linear.feature_calls(arch)),
}


def constants(launch: Launch) -> dict[str, object]:
    names = launch.kernel.arg_names[len(launch.specialization.types) :]
    return dict(zip(names, launch.specialization.constants, strict=True))


def tiles(launch: Launch) -> str:
    """A plan, spelled out."""
    names = ("BLOCK", "BT", "BD", "BK", "SWAP")
    sizes = [f"{name}={value}" for name, value in constants(launch).items() if name in names]
    warps, stages = launch.specialization.num_warps, launch.specialization.num_stages
    return f"{launch.kernel.fn.__name__} {' '.join(sizes)}, {warps} warps, {stages} stages"


def width(launch: Launch) -> int:
    found = constants(launch)
    return found.get("H") or sum(found.get("WIDTHS", ()))


def operands(launch: Launch) -> int:
    """Pointers, strides and numbers that the binary takes; an absent one has Triton's type constexpr."""
    text = str(launch.specialization.types)
    return text.count("'") // 2 - text.count("'constexpr'")


def extent(launches: Mapping[str, Launch]) -> dict[str, dict[str, object]]:
    """By plan: the least and the most of width and operands. By kernel: what each argument is."""
    plans, kernels = defaultdict(list), defaultdict(lambda: defaultdict(set))
    for launch in launches.values():
        plans[tiles(launch)].append(launch)
        found = kernels[launch.kernel.fn.__name__]
        for name, kind in zip(launch.kernel.arg_names, launch.specialization.types, strict=False):
            found[name].add(kind)
        for name, value in constants(launch).items():
            if name not in ("H", "WIDTH", "WIDTHS"):
                found[name].add(value)
        found["aligned"].add(launch.specialization.aligned)
    edges = {
        plan: {size.__name__: (min(map(size, made)), max(map(size, made))) for size in (width, operands)}
        for plan, made in plans.items()
    }
    return edges | {kernel: dict(found) for kernel, found in kernels.items()}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("gate", GATES)
def test_the_selection_reaches_as_far_as_the_whole(gate: str, arch: Arch) -> None:
    every = GATES[gate](arch)
    chosen = representatives(every)
    assert chosen.items() <= every.items()
    assert extent(chosen) == extent(every)
    assert len(chosen) < len(every)


def test_the_whole_has_every_kernel_there_is() -> None:
    """A kernel that no case launches would be compiled by neither. Kernels are named after their op, helpers not."""
    modules = memory_ops.KERNELS | {"norm_concat_linear": linear.kernels, "dequantize": linear.dequantize}
    defined = {name for op, module in modules.items() for name in vars(module) if name.startswith(f"_{op}")}
    launched = {launch.kernel.fn.__name__ for gate in GATES.values() for launch in gate(90).values()}
    assert len(launched) == 7 and launched == defined
