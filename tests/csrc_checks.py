"""The checks of csrc, found in its sources: where each is called, and the rules that it checks there."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bad_calls import BadCall
from guards import same_bits
from primitives import run_primitive, tensors_of

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# Not searched: the checks themselves, and the benchmark's ceiling, which tests/test_memory_bandwidth.py tests.
_OTHERS = {CSRC / "checks.h", CSRC / "checks.cpp", CSRC / "memory_bandwidth.cpp"}
MESSAGE = re.compile(r"^(?P<op>\w+): (?P<argument>\w+): (?P<rule>[\w ]+) \((?P<file>\w+\.\w+):(?P<line>\d+)\)$")


@dataclass(frozen=True)
class Check:
    """One rule of one call of a check function, and the lines of that call."""

    file: str
    first_line: int
    last_line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first_line}: {self.rule}"


def checks(*, cuda: bool) -> set[Check]:
    """The checks in the ops' host files. Those that only the CUDA primitives have are under EAGLE_KERNELS_WITH_CUDA."""
    found = set()
    rules = _rules_of_helpers()
    for path in sorted({*CSRC.glob("*.cpp"), *CSRC.glob("*.h")} - _OTHERS):
        text = path.read_text()
        for call in re.finditer(r"(?<![\w:])(check\w*)\(", text):
            end = _closing(text, call.end() - 1)
            before = text[: call.start()]
            if cuda != (before.count("#if defined(EAGLE_KERNELS_WITH_CUDA)") > before.count("#endif")):
                continue
            lines = (before.count("\n") + 1, text[:end].count("\n") + 1)
            own = [_last_literal(text[call.start() : end])] if call[1] == "check" else rules[call[1]]
            found |= {Check(path.name, *lines, rule) for rule in own}
    return found


def _rules_of_helpers() -> dict[str, list[str]]:
    """For each helper of checks.h, the rules that it may name: its own, and those of the helpers that it calls."""
    text = (CSRC / "checks.h").read_text()
    rules: dict[str, list[str]] = {}
    for helper in re.finditer(r"^inline void (check_\w+)\(.*?^}", text, re.M | re.S):
        body = helper[0][helper[0].index(") {") :]
        rules[helper[1]] = []
        for call in re.finditer(r"\b(check\w*)\(", body):
            called = body[call.start() : _closing(body, call.end() - 1)]
            rules[helper[1]] += [_last_literal(called)] if call[1] == "check" else rules[call[1]]
    return rules


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError("unbalanced parentheses")


def _last_literal(call: str) -> str:
    return re.findall(r'"([^"]*)"', call)[-1]


def failure_of(ops: object, call: BadCall) -> re.Match:
    """The parsed message with which the primitive refuses `call`; it must have written nothing."""
    torch.manual_seed(0)
    arguments = call.arguments()
    tensors = tensors_of(arguments)
    before = [tensor.clone() for tensor in tensors]
    try:
        run_primitive(ops, call.op, arguments)
    except RuntimeError as error:
        message = MESSAGE.match(str(error))
        assert message is not None and message["op"] in (call.op, "eagle_kernels"), str(error)
    else:
        raise AssertionError(f"{call.id} was not refused")
    assert all(map(_same, before, tensors)), "a call that was refused wrote"
    return message


def _same(a: Tensor, b: Tensor) -> bool:
    return a.numel() == 0 or same_bits(a, b.contiguous())


def unreached(messages: list[re.Match], *, cuda: bool) -> list[str]:
    """The checks that none of these failures comes from."""
    reached = {(message["file"], int(message["line"]), message["rule"]) for message in messages}
    return sorted(
        str(check)
        for check in checks(cuda=cuda)
        if not any((check.file, line, check.rule) in reached for line in range(check.first_line, check.last_line + 1))
    )
