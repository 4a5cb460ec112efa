"""Which binaries the compile gate compiles by default; with `--all-binaries` (`make test-compile`) it compiles each.

For each kernel and arch the chosen binaries together cover

- every plan: tile constants, warps and stages that go together;
- the edges of every plan: its narrowest and its widest rows, its fewest and its most operands;
- every type that an argument has, absence included, every value of a constant but the widths, aligned and unaligned.

A binary that is left out only combines what the others cover one by one.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping

from compile.offline import Launch

_TILES = {"BLOCK", "BT", "BD", "BK", "SWAP"}
_WIDTHS = {"H", "WIDTH", "WIDTHS"}  # widths of rows, bounds of loops: every preset has its own


def representatives(launches: Mapping[str, Launch]) -> dict[str, Launch]:
    """The part of these launches, by case, that covers what all of them cover."""
    properties = properties_of(launches)
    covered, chosen = set(), {}
    # Edges have the most properties: taken first, they cover most of what the rest has.
    for case in sorted(launches, key=lambda case: -len(properties[case])):
        if properties[case] - covered:
            covered |= properties[case]
            chosen[case] = launches[case]
    return chosen


def properties_of(launches: Mapping[str, Launch]) -> dict[str, set[Hashable]]:
    """By case: what a selection has to cover."""
    properties, plans = {}, defaultdict(list)
    for case, launch in launches.items():
        kernel, (types, constants) = launch.kernel.fn.__name__, _arguments(launch)
        values = types | {name: value for name, value in constants.items() if name not in _TILES | _WIDTHS}
        properties[case] = {(kernel, name, value) for name, value in values.items()}
        properties[case] |= {_plan(launch), (kernel, launch.specialization.aligned)}
        plans[_plan(launch)].append(case)
    for plan, cases in plans.items():
        for size in (_width, _operands):
            for edge in (min, max):
                properties[edge(cases, key=lambda case, size=size: size(launches[case]))].add((plan, size, edge))
    return properties


def _arguments(launch: Launch) -> tuple[dict[str, Hashable], dict[str, Hashable]]:
    """The types of the run-time arguments and the values of the constants, by name."""
    names, specialization = launch.kernel.arg_names, launch.specialization
    types = dict(zip(names, specialization.types, strict=False))
    return types, dict(zip(names[len(types) :], specialization.constants, strict=True))


def _plan(launch: Launch) -> tuple:
    _, constants = _arguments(launch)
    tiles = tuple((name, value) for name, value in constants.items() if name in _TILES)
    return launch.kernel.fn.__name__, tiles, launch.specialization.num_warps, launch.specialization.num_stages


def _width(launch: Launch) -> int:
    """0 where no constant has it: the kernel is the same for all widths."""
    _, constants = _arguments(launch)
    return sum(constants.get("WIDTHS", ())) or constants.get("H", 0)


def _operands(launch: Launch) -> int:
    def count(kind: object) -> int:
        return sum(map(count, kind)) if isinstance(kind, tuple) else kind != "constexpr"

    return count(launch.specialization.types)
