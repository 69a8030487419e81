#!/usr/bin/env python3
"""Checks the machine code of a CUDA build with cuobjdump: that every kernel was compiled for all architectures that it is
for, that static shared memory stays below the 48 KB that need no opt-in, and that no kernel spills more registers to local
memory than the table below allows.

  scripts/check_kernels.py [BUILD]      checks the objects of a build folder (default: build/cuda)
      [--architectures 80,90,100,120]   those that the build is for
  scripts/check_kernels.py --measure    prints the spills of all kernels that have some
  scripts/check_kernels.py --has-tool   exits with 0 if cuobjdump is found
  scripts/check_kernels.py --self-test  expects reports for made-up listings

cuobjdump comes with the CUDA toolkit (Debian package cuda-cuobjdump-13-0, PyPI package nvidia-cuda-cuobjdump): it is
looked up on PATH, beside nvcc, and in build/venv, where CI installs it.
"""
import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = "80,90,100,120"
HOPPER = {"sm_90a"}  # objects of cmake/layers.cmake that are compiled for sm_90a alone
MAX_STATIC_SHARED = 48 << 10
# Bytes of local memory per thread that a kernel may use on any architecture, by a pattern of its demangled name; the first
# match counts. Attention at its register limit spills: most for heads of 256, and on 10.0 and 12.0, which lose more registers
# to addresses; there also paged attention that expands keys in e4m3. The two kernels of sampling index small arrays.
ALLOWED_STACK = [
    (r"attention_forward_kernel<__nv_bfloat16, 256.*WithDropout", 416), (r"attention_forward_kernel<__nv_bfloat16, 256", 368),
    (r"attention_forward_kernel<__nv_bfloat16, 128.*WithDropout", 96), (r"attention_forward_kernel<__nv_bfloat16, 64", 168),
    (r"attention_forward_kernel<__nv_bfloat16, 128.*Int8Problem", 120),
    (r"attention_forward_kernel<__nv_bfloat16, 128", 72), (r"attention_paged_kernel<float, 64.*WithDropout", 104),
    (r"attention_(forward|paged)_kernel<float", 88),
    (r"attention_paged_kernel<__nv_bfloat16.*unsigned char", 80), (r"attention_paged_kernel<__nv_bfloat16, 128", 32),
    (r"\bbackward_kernel<.*WithDropout", 144), (r"\bbackward_kernel<", 80),
    (r"forward_sm90_kernel<.*Sm90Shape<256, 2, false>", 192), (r"forward_sm90_kernel<.*Sm90Shape<256, 2, true>", 112),
    (r"\b(sample|modify)_kernel", 136), (r"delta_rows_kernel<float, 128", 160),
    ("", 24)]

ARCH = re.compile(r"^arch = (\w+)")
FUNCTION = re.compile(r"^ Function (\S+):")
USAGE = re.compile(r"^\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def cuobjdump():
    """The path of the tool; exits with the next step if there is none."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    places = [shutil.which("cuobjdump"), Path(nvcc).resolve().parent / "cuobjdump"]
    places += sorted((ROOT / "build/venv").glob("lib/python*/site-packages/nvidia/**/cuobjdump"))
    for place in places:
        if place and Path(place).is_file():
            return str(place)
    sys.exit("check_kernels.py: no cuobjdump found; install the package cuda-cuobjdump-13-0, or run\n"
             "  python3 -m venv build/venv && build/venv/bin/pip install 'nvidia-cuda-cuobjdump~=13.0'")


def demangled(names):
    names = list(names)
    out = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return dict(zip(names, out.splitlines()))


def parse(listing):
    """(architecture, kernel, registers, stack, static shared memory) of each kernel of an object."""
    found, arch, kernel = [], None, None
    for line in listing.splitlines():
        if match := ARCH.match(line):
            arch = match.group(1)
        elif match := FUNCTION.match(line):
            kernel = match.group(1)
        elif match := USAGE.match(line):
            found.append((arch, kernel, *map(int, match.groups())))
    return found


def problems(objects, names, architectures):
    """Messages about objects {path: parse()}; names: demangled()."""
    out = []
    every = {f"sm_{number}" for number in architectures.split(",")}
    for path, kernels in objects.items():
        compiled = {}
        for arch, kernel, _, stack, shared in kernels:
            compiled.setdefault(kernel, set()).add(arch)
            name = names[kernel]
            allowed = next(limit for pattern, limit in ALLOWED_STACK if re.search(pattern, name))
            if stack > allowed:
                out.append(f"{path}: {arch}: {stack} bytes of local memory, allowed {allowed}: {name}")
            if shared > MAX_STATIC_SHARED:
                out.append(f"{path}: {arch}: {shared} bytes of static shared memory: {name}")
        for kernel, have in compiled.items():
            if have not in (every, HOPPER):
                out.append(f"{path}: compiled for {', '.join(sorted(have))} only: {names[kernel]}")
    return out


def read(build):
    tool, objects = cuobjdump(), {}
    for path in sorted(build.glob("CMakeFiles/cohort_*.dir/**/*.cu.o")):
        listing = subprocess.run([tool, "--dump-resource-usage", str(path)], capture_output=True, text=True)
        if listing.returncode != 0:
            sys.exit(f"check_kernels.py: cuobjdump cannot read {path}: {listing.stderr.strip()}")
        objects[str(path.relative_to(build))] = parse(listing.stdout + listing.stderr)
    if not any(objects.values()):
        sys.exit(f"check_kernels.py: no kernels in {build}; run scripts/build.sh cuda first")
    return objects


def self_test():
    def listing(arch, stack=0, shared=0):
        return f"arch = {arch}\n Function k:\n  REG:40 STACK:{stack} SHARED:{shared} LOCAL:0\n"

    every = listing("sm_80") + listing("sm_90")
    names = {"k": "k()"}
    cases = [(every, 0), (listing("sm_90a"), 0), (listing("sm_90"), 1), (every + listing("sm_90", stack=48), 1),
             (every + listing("sm_80", shared=50000), 1)]
    for text, expected in cases:
        found = problems({"o": parse(text)}, names, "80,90")
        if len(found) != expected:
            sys.exit(f"check_kernels.py: self-test: expected {expected} problems, got {found}")
    print(f"check_kernels.py: self-test: {len(cases)} listings judged as expected")


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if arguments == ["--has-tool"]:
        return cuobjdump()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=Path, default=ROOT / "build/cuda")
    parser.add_argument("--architectures", default=ARCHITECTURES)
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args(arguments)
    objects = read(options.build)
    names = demangled({k[1] for kernels in objects.values() for k in kernels})
    if options.measure:
        for kernels in objects.values():
            for arch, kernel, registers, stack, _ in kernels:
                if stack > 0:
                    print(f"{arch:8} {registers:4} registers {stack:5} bytes  {names[kernel]}")
        return None
    found = problems(objects, names, options.architectures)
    for line in found:
        print(line)
    count = sum(len(kernels) for kernels in objects.values())
    print(f"check_kernels.py: {len(found)} problems in {count} kernels of {len(objects)} objects")
    return sys.exit(1 if found else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
