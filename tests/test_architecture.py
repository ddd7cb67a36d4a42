"""Rules of the tree that no linter knows; import directions are import-linter's (`make check`)."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.messages import protocol

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "controlplane", "worker", "engine", "kernels", "contract", "lora_dash", "demo", "bench",
    "cli",
)  # fmt: skip
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_MESSAGES = 12


def _sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "migrations" not in path.parts:
                yield path


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a kernel, or a kernel's launcher: most of its lines name the arguments."""
    return function.name.endswith("_triton") or any(
        "jit" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def test_no_file_is_named_for_nothing() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for path in _sources() if path.stem in names] == []


def test_functions_stay_readable() -> None:
    too_long = []
    for path in _sources():
        if path.is_relative_to(ROOT / "bench"):
            continue
        name = path.relative_to(ROOT)
        for function in _functions(ast.parse(path.read_text())):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            limit = MAX_KERNEL_LINES if _is_kernel(function) else MAX_FUNCTION_LINES
            if lines > limit:
                too_long.append(f"{name}: {function.name} has {lines} lines")
    assert too_long == []


def test_every_operation_stands_beside_its_reference() -> None:
    paths = sorted((ROOT / "kernels").glob("*.py"))
    defined = {f.name for path in paths for f in _functions(ast.parse(path.read_text()))}
    package = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    [public] = [
        ast.literal_eval(node.value)
        for node in package.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    operations = {name for name in public if name in defined}
    assert len(operations) > 5
    assert {name for name in operations if f"{name}_ref" not in defined} == set()


def test_few_messages_cross_the_wire() -> None:
    messages = [
        value
        for value in vars(protocol).values()
        if isinstance(value, type)
        and issubclass(value, protocol.Message)
        and dataclasses.is_dataclass(value)
    ]
    assert 0 < len(messages) <= MAX_MESSAGES


@pytest.mark.skipif(not importlib.util.find_spec("django"), reason="needs the control plane's pins")
def test_every_error_of_the_worker_has_an_answer() -> None:
    from controlplane.errors import WORKER_ERRORS

    assert set(WORKER_ERRORS) == set(protocol.ErrorCode)
    assert all(400 <= error.status < 600 for error in WORKER_ERRORS.values())


def _may_read_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")


def test_the_environment_is_read_in_two_files() -> None:
    readers = []
    for path in _sources():
        if path.is_relative_to(ROOT / "demo") or path.is_relative_to(ROOT / "bench"):
            continue
        tree = ast.parse(path.read_text())
        reads = {ast.unparse(node) for node in ast.walk(tree) if _may_read_environment(node)}
        if reads & {"os.environ", "os.getenv"}:
            readers.append(str(path.relative_to(ROOT)))
    # celery.py and asgi.py name the settings module, which Django must know before it has settings.
    allowed = {"controlplane/settings.py", "controlplane/celery.py", "controlplane/asgi.py"}
    assert set(readers) <= allowed | {"worker/config.py", "cli/lorikeet_cli/config.py"}


def test_nothing_third_party_or_large_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    minified = [path.name for path in files if path.name.endswith((".min.js", ".min.css"))]
    written = [path for path in files if path.is_file()]
    large = [path.name for path in written if path.stat().st_size > 1_000_000]
    assert (minified, large) == ([], [])
