"""Print how large the project is: code, functions, folders, cycles, data, words, and dialect.

    python -m tests.extent

It reads what git tracks and runs nothing. Migrations and tests count apart from code. A cycle is a
group of packages that import each other at the top of their modules.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_words import all_defects

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "engine", "worker", "contract", "controlplane", "cli", "demo", "bench")
#: Suffixes of files that programs write or read, and nobody edits by hand.
DATA = (".json", ".jsonl", ".svg", ".csv")
WORD = re.compile(r"\S*\w\S*")


def tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def functions(tree: ast.AST) -> Iterator[int]:
    """Yield the number of lines of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def package_of(module: str) -> str:
    """Return `controlplane.gateway` of `controlplane.gateway.views`, and `worker` of `worker.x`."""
    return ".".join(module.split(".")[:2])


def imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of more than one node that reach each other."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for node in arrows.get(waiting.pop(), ()):
                if node not in found:
                    found.add(node)
                    waiting.append(node)
        return found

    all_reached = {node: reached(node) for node in arrows}
    groups = {
        tuple(sorted({node} | {other for other in ends if node in all_reached.get(other, ())}))
        for node, ends in all_reached.items()
        if node in ends
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def main() -> None:
    files = tracked()
    code: Counter[str] = Counter()
    lengths: dict[str, list[int]] = defaultdict(list)
    folders: Counter[str] = Counter()
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in (each for each in files if each.suffix == ".py"):
        place = path.relative_to(ROOT)
        top = place.parts[0]
        if top == "tests" or "migrations" in place.parts:
            code["tests" if top == "tests" else "migrations"] += num_lines(path)
            continue
        name = top if top in PACKAGES else "other"
        tree = ast.parse(path.read_text())
        code[name] += num_lines(path)
        lengths[name].extend(functions(tree))
        folders[str(place.parent)] += path.name != "__init__.py"
        module = ".".join(place.with_suffix("").parts)
        for other in imports(tree):
            if other.split(".")[0] in PACKAGES and package_of(other) != package_of(module):
                arrows[package_of(module)].add(package_of(other))
    print("| package | lines | functions | p50 | p95 | longest |\n|---|---|---|---|---|---|")
    for name in (*PACKAGES, "other"):
        found = sorted(lengths[name]) or [0]
        p95 = found[int(len(found) * 0.95)]
        middle = statistics.median(found)
        print(f"| {name} | {code[name]} | {len(found)} | {middle:.0f} | {p95} | {found[-1]} |")
    written = sum(code[name] for name in (*PACKAGES, "other"))
    data = sum(num_lines(each) for each in files if each.suffix in DATA)
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    words = sum(len(WORD.findall(page.read_text())) for page in pages)
    apps = [each for each in (ROOT / "controlplane").iterdir() if (each / "__init__.py").exists()]
    largest, num_files = folders.most_common(1)[0]
    print(f"code without tests, migrations: {written}")
    print(f"tests: {code['tests']}; migrations: {code['migrations']}; data: {data}")
    print(f"packages of the control plane: {len(apps)}; largest folder: {largest}, {num_files}")
    print(f"cycles of packages: {cycles(arrows) or 'none'}")
    print(f"words of docs/*.md and README.md: {words}")
    print(f"defects of words, by tests/test_words.py: {len(all_defects())}")


if __name__ == "__main__":
    main()
