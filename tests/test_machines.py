"""Machines that lack something: OpenCL, a linker, a cache folder; and PoCL's cache, damaged and full.

A component is missing for a whole process, so each case runs in a separate process.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.drivers.opencl import find_devices, pocl

POCL = any(native.platform.name == pocl.PLATFORM for native in find_devices())
WEBGPU = any(device.name.startswith("webgpu") for device in ps.devices())
needs_pocl = pytest.mark.skipif(not POCL, reason="there is no PoCL on this machine")

CONFIG = """
[model]
context = 16
width = 16
layers = 1
heads = 2
[data]
path = {path!r}
tokenizer = "bytes"
batch = 4
[run]
steps = 3
"""

# Before anything else in a process: modules that cannot be imported, as where they are not installed, and no
# OpenCL platform, as where PyOpenCL is all that there is of OpenCL.
WITHOUT = """
import os, sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name in os.environ["WITHOUT"].split():
            raise ImportError(f"{name} is not on this machine")
sys.meta_path.insert(0, Without())
if "platforms" in os.environ["WITHOUT"]:
    import pyopencl
    os.environ["PYOPENCL_HOME"] = os.environ["OCL_ICD_VENDORS"] = os.environ["HERE"]
"""

# The end of a run of training in short: a small sample, and no rates of the device are measured.
SHORT = """
from penstock.cli import training
from penstock.measuring import ceilings
training._SAMPLE = 8
ceilings._measured = lambda *_: 1e11
"""

# Separate programs for kernels that differ, so that an error in any of them shows.
MAPS = """
import sys
sys.modules["wgpu"] = None  # not looked for: it takes as long to load as all the rest
import numpy as np
import penstock as ps
device = ps.use("opencl")
x = np.random.default_rng(0).random((100, 100), np.float32)
for name in ("exp", "sqrt", "square", "tanh", "floor"):
    t = ps.jit(lambda t, name=name: getattr(ps, name)(t) + t)(ps.asarray(x))
    np.testing.assert_allclose(t.numpy(), getattr(np, name)(x) + x, rtol=1e-5)
print("right")
"""


def python(
    text: str, folder: Path, *, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python, with a cache of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    environment.pop("PENSTOCK_DEVICE", None)
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, cwd=folder, capture_output=True, text=True
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def command(arguments: list[str]) -> str:
    return f"import sys; sys.argv[1:] = {arguments!r}; from penstock.cli import main; main()"


def commands(*given: tuple[str, int]) -> str:
    """A program of several commands, each of which ends with a status."""
    return f"""
import sys
from penstock.cli import main
for words, status in {given!r}:
    sys.argv[1:] = words.split()
    try:
        main()
        ended = 0
    except SystemExit as end:
        ended = end.code or 0
    assert ended == status, (words, ended)
"""


def training(folder: Path) -> list[str]:
    text = folder / "text"
    text.write_text("a penstock takes water from a pool to a turbine. " * 40)
    config = folder / "config.toml"
    config.write_text(CONFIG.format(path=str(text)))
    return ["train", "--config", str(config), "--out", str(folder / "run")]


# What is not installed


@pytest.mark.parametrize(
    ("without", "default", "trains"),
    [
        pytest.param("pyopencl", "webgpu:0", True, marks=pytest.mark.slow),
        pytest.param("platforms", "webgpu:0", False, marks=pytest.mark.slow),
        pytest.param("pyopencl wgpu", "host", False, marks=pytest.mark.slow),
        pytest.param("platforms wgpu", "host", True, marks=pytest.mark.slow),
        ("wgpu", "opencl:0", False),
    ],
)
def test_what_is_not_installed_is_done_without(
    tmp_path: Path, without: str, default: str, trains: bool
) -> None:
    missing = {"WITHOUT": without, "HERE": str(tmp_path)}
    if default.startswith("webgpu") and not WEBGPU:
        pytest.skip("there is no WebGPU adapter on this machine")
    asked = "webgpu" if default.startswith("opencl") else "opencl"
    done = python(WITHOUT + commands(("devices", 0), (f"devices {asked}", 1)), tmp_path, **missing)
    listed = done.stdout
    assert f"{default} *" in listed
    assert ("opencl" in listed) == ("pyopencl" not in without and "platforms" not in without)
    assert ("webgpu" in listed) == (WEBGPU and "wgpu" not in without)
    assert f"there is no device '{asked}'" in done.stderr
    if trains:
        python(WITHOUT + SHORT + command(training(tmp_path)), tmp_path, **missing)
        assert (tmp_path / "run" / "report.html").exists()


# A linker


@pytest.mark.slow
@needs_pocl
def test_without_a_linker_another_device_is_the_default(tmp_path: Path) -> None:
    paths = {"PATH": str(tmp_path)}
    listed = python(command(["devices"]), tmp_path, **paths)
    assert "opencl" not in listed.stdout
    assert "apt install binutils" in listed.stderr
    done = python(SHORT + command([*training(tmp_path), "--device", "host"]), tmp_path, **paths)
    assert "binutils" not in done.stderr, "who names a device need not hear of another"
    names = "opencl", "opencl:0"
    told = python(commands(*((f"devices {name}", 1) for name in names)), tmp_path, **paths).stderr
    for name in names:
        assert f"{name} cannot be used here: PoCL needs the linker ld to compile kernels" in told
    text = (
        f"import penstock as ps\nfor name in {names!r}:\n    try: ps.use(name)\n"
        "    except ps.errors.DeviceUnavailable: print('told')"
    )
    assert python(text, tmp_path, **paths).stdout == "told\n" * 2


@needs_pocl
@pytest.mark.slow
@pytest.mark.parametrize("linker", ["ld", "x86_64-unknown-linux-gnu-ld"])
def test_pocl_finds_the_linkers_that_are_looked_for(tmp_path: Path, linker: str) -> None:
    result = shutil.which("ld")
    assert result is not None
    (tmp_path / linker).symlink_to(result)
    assert python(MAPS, tmp_path, PATH=str(tmp_path)).stdout == "right\n"


# PoCL's cache


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "emptied":
        content.clear()
    elif kind == "cut":
        del content[len(content) // 2 :]
    elif kind == "longer":
        content += bytes(100)
    elif kind == "a bit":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        content[:] = bytes(len(content))
    elif kind == "noise":
        content[:] = random.randbytes(len(content))
    if kind in ("gone", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    else:
        path.write_bytes(content)


@needs_pocl
@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["own folder", "POCL_CACHE_DIR"])
def test_damaged_kernels_are_compiled_again(tmp_path: Path, own: bool) -> None:
    settings = {} if own else {"POCL_CACHE_DIR": str(tmp_path / "given")}
    folder = tmp_path / "cache" / "penstock" / "pocl" if own else tmp_path / "given"
    python(MAPS, tmp_path, **settings)
    kept = sorted((folder / "programs").iterdir())
    assert len(kept) == 5
    assert list((folder / "running").iterdir()) == []
    before = {path: path.read_bytes() for path in kept}
    rounds = ("emptied", "cut", "longer", "a bit", "zeros"), ("noise", "gone", "folder", "a bit", "cut")
    for kinds in rounds if own else rounds[1:]:
        for path, kind in zip(kept, kinds, strict=True):
            damage(path, kind)
        done = python(MAPS, tmp_path, **settings)
        assert done.stdout == "right\n"
        told = sum(kind not in ("gone", "folder") for kind in kinds)
        assert done.stderr.count("was damaged: its kernels are compiled again") == told
        for path in kept:
            if path.is_dir():
                path.rmdir()
                path.write_bytes(before[path])
            assert path.stat().st_size == len(before[path]), "it was written again"
    assert python(MAPS, tmp_path, **settings).stderr == ""


@pytest.mark.slow
@needs_pocl
def test_what_was_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    python(MAPS, tmp_path)
    kept = tmp_path / "cache" / "penstock" / "pocl" / "programs"
    before = {path: path.stat().st_ino for path in kept.iterdir()}
    # A program from the disk is not written again; with all kernels present, no linker is needed.
    assert python(MAPS, tmp_path).stdout == "right\n"
    assert {path: path.stat().st_ino for path in kept.iterdir()} == before
    text = (
        f"import os\nfrom penstock import devices; devices()\nos.environ['PATH'] = {str(tmp_path)!r}\n{MAPS}"
    )
    assert python(text, tmp_path).stdout == "right\n"
    python(MAPS, tmp_path, POCL_EXTRA_BUILD_FLAGS="-cl-mad-enable")
    assert len(list(kept.iterdir())) == 2 * len(before), "what PoCL compiles with other flags is other code"


FLAGS = """
import os
import penstock as ps
source = "#ifndef VALUE\\n#define VALUE 1\\n#endif\\n"
source += "__kernel void which(__global int *out) { out[0] = VALUE; }"
device = ps.registry.find("opencl")
for flags in VALUES:
    if flags is None:
        del os.environ["POCL_EXTRA_BUILD_FLAGS"]
    else:
        os.environ["POCL_EXTRA_BUILD_FLAGS"] = flags
    out = device.empty(4)
    kernel = device.compile(source, {"which": ("int32*",)})["which"]
    device.stream.launch(kernel, (1,), (1,), (out,))
    print(device.download(out).wait().view("int32")[0])
    source += "\\n"
"""


@pytest.mark.slow
@needs_pocl
def test_kernels_are_kept_by_the_flags_that_they_were_compiled_with(tmp_path: Path) -> None:
    """PoCL keeps the first value of the variable in a process, whatever the environment says later."""
    cases = {("-DVALUE=2", "-DVALUE=3"): "22", (None, "-DVALUE=3"): "13", ("", "-DVALUE=2"): "11"}
    for values, expected in cases.items():
        output = python(FLAGS.replace("VALUES", repr(values)), tmp_path, POCL_EXTRA_BUILD_FLAGS="").stdout
        assert "".join(output.split()) == expected


@needs_pocl
@pytest.mark.slow
def test_a_killed_process_leaves_kernels_and_no_folder(tmp_path: Path) -> None:
    again = "time.sleep(1.1)\nps.jit(lambda t: ps.exp(t) + t)(ps.asarray(x)).numpy()\n"
    text = MAPS + "import time\n" + again * 2  # the first has a kernel that is new
    text += "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    assert python(text, tmp_path, check=False).returncode == -signal.SIGKILL
    folder = tmp_path / "cache" / "penstock" / "pocl"
    assert len(list((folder / "running").iterdir())) == 2
    assert len(list((folder / "programs").iterdir())) >= 5, "kept while it ran"
    python("import penstock as ps; ps.devices()", tmp_path)
    assert list((folder / "running").iterdir()) == []


@pytest.mark.slow
@needs_pocl
def test_processes_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    children = [
        subprocess.Popen([sys.executable, "-c", MAPS], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [child.communicate()[0] for child in children] == ["right\n"] * 3
    assert len(list((tmp_path / "cache" / "penstock" / "pocl" / "programs").iterdir())) == 5


@pytest.mark.slow
@needs_pocl
def test_the_cache_is_bounded(tmp_path: Path) -> None:
    bounds = (
        "from penstock.drivers import binaries\nfrom penstock.drivers.opencl import pocl\n"
        "pocl._MAX_PROGRAMS, pocl._FIRST_SAVE_SECONDS = 2, 0.0\n"
        "pocl._MAX_BYTES = 150_000\n"
    )
    after = "folders = list(pocl.cache()._folders()); assert len(folders) == 2, folders\n"
    for _ in range(2):
        assert python(bounds + MAPS + after, tmp_path).stdout == "right\n"
    kept = list((tmp_path / "cache" / "penstock" / "pocl" / "programs").iterdir())
    assert 1 <= len(kept) < 5
    assert sum(path.stat().st_size for path in kept) <= 150_000


@pytest.mark.slow
@needs_pocl
def test_a_cache_folder_that_cannot_be_used_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert python(MAPS, tmp_path).stdout == "right\n"
    full = "import shutil; shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(1, 1, 0)\n"
    (tmp_path / "cache").unlink()
    refused = python(full + MAPS, tmp_path, check=False)
    assert "PoCL finds no folder with free space" in refused.stderr


@pytest.mark.slow
@needs_pocl
def test_child_processes_have_the_cache_that_the_user_chose(tmp_path: Path) -> None:
    without = "import sys\nsys.modules['wgpu'] = None\n"
    text = f"{without}import os, penstock as ps; ps.devices(); print(os.environ.get('POCL_CACHE_DIR'))"
    assert python(text, tmp_path).stdout == "None\n"
    assert python(text, tmp_path, POCL_CACHE_DIR=str(tmp_path)).stdout == f"{tmp_path}\n"
    forked = (
        f"{without}import os\nfrom penstock.drivers.opencl import pocl\nimport penstock as ps\nps.devices()\n"
        "child = os.fork()\nif child == 0: sys.exit(0)\nos.waitpid(child, 0)\n"
        "assert pocl.cache().folder.is_dir()\n"
    )
    python(forked, tmp_path)


@pytest.mark.slow
def test_pyopencl_keeps_nothing_on_disk_and_little_in_memory(tmp_path: Path) -> None:
    text = (
        "import linecache\nfrom penstock.drivers.opencl import invokers\ninvokers._MAX_KERNELS = 3\n"
        + MAPS
        + "from pyopencl import invoker\n"
        "assert len(invoker.invoker_cache._code) == 3\n"
        "assert not [name for name in linecache.cache if 'pyopencl' in name]\n"
    )
    python(text, tmp_path)
    assert not (tmp_path / "cache" / "pytools").exists()
