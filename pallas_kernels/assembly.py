"""Registers, spills and machine code of the Hopper kernels of latent attention, without a GPU.

    pip install --no-deps --target=UNPACKED jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2 nvidia-cuda-nvcc \\
        nvidia-nvvm nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
    python -m pallas_kernels.assembly --packages=UNPACKED --out=build/assembly --only=16_1_128_32896

What Mosaic makes of a kernel goes through the compiler inside the CUDA plugin, which wants a driver to load the result
into: a library of empty functions stands in for it (built with ``gcc``) and keeps the machine code. Per kernel that
leaves ``.ptx``, ``.ptxas`` (registers, spills, products that had to be serialised), ``.cubin`` and ``.sass``, and
prints what ``ptxas`` said. A spill in a loop or a serialised product costs more than most of what is tried on a GPU.
"""

import argparse
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax

from pallas_kernels.compat import mosaic_modules
from pallas_kernels.rotated_latent_attention import hopper
from pallas_kernels.rotated_latent_attention.arg_specs import DECODE, EXTEND, ArgSpec, arguments

PLUGIN, CUDA = Path("jax_plugins/xla_cuda13/xla_cuda_plugin.so"), Path("nvidia/cu13")
RUNTIME = Path("jax_cuda13_plugin/libmosaic_gpu_runtime.so")
# Attributes of a device the compiler asks for: capability 9.0, 132 multiprocessors, shared memory of a block.
DRIVER = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
int cuDeviceGetAttribute(int* value, int name, int device) {
  *value = name == 75 ? 9 : name == 76 ? 0 : name == 16 ? 132 : name == 97 ? 232448 : 1024;
  return 0;
}
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuModuleLoadData(void** module, const char* image) {
  uint64_t size = *(uint64_t*)(image + 40) + (uint64_t)*(uint16_t*)(image + 58) * *(uint16_t*)(image + 60);
  uint64_t end = *(uint64_t*)(image + 32) + (uint64_t)*(uint16_t*)(image + 54) * *(uint16_t*)(image + 56);
  FILE* file = fopen(getenv("CUBIN"), "wb");
  fwrite(image, 1, size > end ? size : end, file);
  fclose(file);
  _Exit(0);  // nothing else is wanted
}
"""
COMPILE = """
import ctypes, sys
plugin, module = ctypes.CDLL(sys.argv[1]), open(sys.argv[2], "rb").read()
plugin.MosaicGpuCompile(ctypes.c_char_p(module), ctypes.c_int(len(module)))
sys.exit("not compiled")
"""


def main(argv: list[str] | None = None) -> None:
    """Compiles the kernels of the shapes that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/assembly"))
    parser.add_argument(
        "--only", default="16_1_128_32896,128_64_1_4096", help="heads_batch_tokens_length, commas between"
    )
    options = parser.parse_args(argv)
    packages, out = options.packages.resolve(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    driver = empty_driver(packages / PLUGIN, out)
    for spec in DECODE + EXTEND:
        shape = f"{spec.heads}_{spec.requests}_{spec.query_tokens}_{spec.kv_length}"
        if shape in options.only.split(","):
            for index, module in enumerate(kernels_of(spec)):
                print(f"{shape} kernel {index}", flush=True)
                print(assembled(module, packages, driver, out / f"{shape}_{index}"), flush=True)


def kernels_of(spec: ArgSpec) -> list[bytes]:
    """Mosaic's modules of the call: attention and, where tables are split, merging."""
    operands = jax.eval_shape(lambda: {name: x for name, x in arguments(spec).items() if name != "scale"})
    return mosaic_modules(partial(hopper.rotated_latent_attention, scale=1 / 16), operands)


def empty_driver(plugin: Path, folder: Path) -> Path:
    """A ``libcuda.so.1`` with every function that the plugin names, in a folder of its own."""
    names = set(re.findall(rb"\x00(cu[A-Z][A-Za-z0-9_]+)\x00", plugin.read_bytes()))
    defined = set(re.findall(r"^int (\w+)\(", DRIVER, re.MULTILINE))
    empty = [f"int {name}() {{ return 0; }}" for name in sorted(x.decode() for x in names) if name not in defined]
    driver = folder / "driver"
    driver.mkdir(exist_ok=True)
    (driver / "driver.c").write_text(DRIVER + "\n".join(empty))
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"], cwd=driver, check=True)
    return driver


def assembled(module: bytes, packages: Path, driver: Path, folder: Path) -> str:
    """What ``ptxas`` said of a kernel; its files are in ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "module").write_bytes(module)
    cuda = packages / CUDA
    environment = os.environ | {
        "PATH": f"{cuda / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(driver),
        "CUBIN": str(folder / "kernel.cubin"),
        "MOSAIC_GPU_CUDA_ROOT": str(cuda),
        "MOSAIC_GPU_RUNTIME_LIB_PATH": str(packages / RUNTIME),
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    command = [sys.executable, "-c", COMPILE, str(packages / PLUGIN), str(folder / "module")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    for passes in folder.glob("*.mlir-passes.log"):
        passes.unlink()  # hundreds of megabytes
    dumped = subprocess.run(
        ["cuobjdump", "-sass", str(folder / "kernel.cubin")],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    (folder / "kernel.sass").write_text(dumped.stdout)
    return "".join(path.read_text() for path in folder.glob("*.ptxas"))


if __name__ == "__main__":
    main()
