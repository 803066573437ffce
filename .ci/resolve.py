"""Whether the dependencies can be installed from wheels alone, on every platform and Python that is promised.

    python .ci/resolve.py              resolves them for each platform and Python
    python .ci/resolve.py --lowest     prints the lowest versions declared, for `pip install -r`

`pip install --dry-run --platform` chooses wheels of another machine, but reads environment markers ("only on
Windows") by the machine and the Python that it runs on. So each target has a process of its own, in which
pip is told what that machine would say of itself.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_LINUX = (
    "manylinux_2_28_{0}",
    "manylinux_2_27_{0}",
    "manylinux_2_26_{0}",
    "manylinux_2_17_{0}",
    "manylinux2014_{0}",
)
# Wheels that each target takes, and what its markers say.
TARGETS = {
    "Linux x86-64": (
        _LINUX,
        {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
    ),
    "Linux aarch64": (
        _LINUX,
        {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64"},
    ),
    "macOS arm64": (
        ("macosx_14_0_{0}",),
        {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
    ),
    "macOS x86-64": (
        ("macosx_14_0_{0}",),
        {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "x86_64"},
    ),
    "Windows x86-64": (
        ("win_amd64",),
        {"sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64"},
    ),
}


def main() -> None:
    """Do what the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lowest", action="store_true")
    parser.add_argument(
        "--target", nargs=2, metavar=("NAME", "PYTHON"), help="only this one, in this process"
    )
    given = parser.parse_args()
    if given.lowest:
        print("\n".join(lowest(requirement) for requirement in requirements()))
    elif given.target:
        sys.exit(resolve(*given.target))
    else:
        sys.exit(resolve_all())


def requirements(*extras: str) -> list[str]:
    """What the project needs, and what its extras need."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]


def lowest(requirement: str) -> str:
    """`name==1.2` for `name>=1.2,<2`, with its marker."""
    given, semicolon, marker = requirement.partition(";")
    bound = re.fullmatch(r"\s*([\w-]+)>=([\w.]+)(,.*)?", given.strip())
    if bound is None:
        raise SystemExit(f"{requirement!r} in pyproject.toml declares no lowest version")
    return f"{bound[1]}=={bound[2]}{semicolon}{marker}"


def resolve_all() -> int:
    """Every target, two at a time; how many could not be resolved."""

    def run(target: tuple[str, str]) -> subprocess.CompletedProcess[str]:
        child = [sys.executable, __file__, "--target", *target]
        return subprocess.run(child, capture_output=True, text=True)

    targets = [(name, python) for name in TARGETS for python in PYTHONS]
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for (name, python), done in zip(targets, pool.map(run, targets), strict=True):
            print(
                f"{name}, Python {python}: {'cannot be installed' if done.returncode else 'resolved'}",
                flush=True,
            )
            if done.returncode:
                failed += 1
                print(done.stderr, file=sys.stderr)
    return failed


def resolve(name: str, python: str) -> int:
    """Resolve one target by pip's own functions, in this process; pip's exit status."""
    from pip._internal.cli.main import main as pip
    from pip._vendor.packaging import markers

    tags, says = TARGETS[name]
    there = {
        **markers.default_environment(),
        **says,
        "os_name": "nt" if says["sys_platform"] == "win32" else "posix",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
    }
    markers.default_environment = lambda: there
    if not markers.Marker(
        f"python_version == '{python}' and sys_platform == '{says['sys_platform']}'"
    ).evaluate():
        raise SystemExit("this version of pip reads markers in another way: change how it is told")
    arguments = ["install", "--dry-run", "--ignore-installed", "-qq", "--no-input", "--only-binary=:all:"]
    arguments += ["--target", "nowhere", "--implementation", "cp", "--python-version", python]
    for tag in tags:
        arguments += ["--platform", tag.format(says["platform_machine"])]
    extras = ("test",) if python == PYTHONS[-1] else ()  # what the tests need takes as long again
    return int(pip([*arguments, *requirements(*extras)]))


if __name__ == "__main__":
    main()
