"""The borders between the packages, which CONTRIBUTING.md promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _modules(package: Path) -> list[str]:
    files = [path.relative_to(package.parent) for path in package.rglob("*.py")]
    return sorted({".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files})


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("crds/firsttoken_api", ("torch", "kopf", "kubernetes", "firsttoken_runtime", "firsttoken_operator")),
        ("operator/firsttoken_operator", ("torch", "transformers", "firsttoken_runtime")),
        ("runtime/firsttoken_runtime", ("kopf", "kubernetes", "firsttoken_operator")),
    ],
)
def test_a_package_never_imports_across_its_border(package: str, never: tuple[str, ...]) -> None:
    modules = [name for name in _modules(ROOT / package) if not name.endswith("__main__")]
    assert len(modules) > 3, "nothing to check: the package is not where it should be"
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {never!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_the_api_process_does_not_load_torch() -> None:
    program = "import sys, firsttoken_runtime.serve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
