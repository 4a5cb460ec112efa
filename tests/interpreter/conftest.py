"""Runs the Triton kernels on the CPU, in Triton's interpreter.

Triton decides when it is imported whether it interprets, and the compile tests of the same run need it not to. So a
file in this folder is one test that runs the file in a process of its own; `TRITON_INTERPRET=1 pytest
tests/interpreter`, which `make test` does, runs the tests one by one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends import environment_of
from eagle_kernels import plan

INTERPRETING = plan.SETTINGS.triton_interpret

# The tests of the other backends, which the files here import and run again.
pytest.register_assert_rewrite(
    "test_add_rms_norm",
    "test_capture_hidden",
    "test_norm_concat",
    "test_norm_concat_linear",
    "test_store_context_kv",
    "test_vocab_parallel_embedding",
)


class _FileInItsOwnProcess(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield _Process.from_parent(self, name="interpreted")


class _Process(pytest.Item):
    def runtest(self) -> None:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(self.path)],
            cwd=self.config.rootpath,
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise _Failed(run.stdout + run.stderr)

    def repr_failure(self, failure: pytest.ExceptionInfo[BaseException]) -> object:
        return str(failure.value) if failure.errisinstance(_Failed) else super().repr_failure(failure)


class _Failed(Exception):
    """The output of a process with failing tests."""


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return None if INTERPRETING else _FileInItsOwnProcess.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=INTERPRETING)
def quick_calls_between_jitted_functions() -> Iterator[None]:
    """The interpreter patches triton.language for the duration of each launch, and again at each call between jitted
    functions, which only the first call into a module needs: the rest is half of the time of these tests."""
    from triton.runtime.interpreter import InterpretedFunction

    call, patched = InterpretedFunction.__call__, set()

    def quick_call(function: InterpretedFunction, *arguments: object, **options: object) -> object:
        if function.fn.__module__ in patched:
            return function.rewrite()(*arguments, **options)
        patched.add(function.fn.__module__)
        return call(function, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", quick_call)
        yield


@pytest.fixture
def triton_backend() -> Iterator[str]:
    """The triton backend, active."""
    with environment_of(EAGLE_KERNELS_BACKEND="triton"):
        yield "triton"


@pytest.fixture
def cpu_isa(triton_backend: str) -> str:
    """Tests that run on every instruction set of the CPU kernels run once here."""
    return triton_backend
