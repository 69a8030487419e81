#!/usr/bin/env python3
"""Checks the rules of the source tree that a compiler does not: who may include whom, which file
may know which library, and what every file must look like. Prints file:line and the broken rule.

  scripts/check_layers.py [ROOT]       checks the tree (default: the one this script lies in)
  scripts/check_layers.py --self-test  breaks every rule in a temporary tree and expects a report
"""
import re
import sys
from pathlib import Path

import tree_check

# Layer -> the layers it may include, besides itself. A layer that is not named below knows all.
LAYERS = {
    "core": [],
    "sys": ["core"],
    "config": ["core"],
    "kernels": ["core"],
    "text": ["core", "sys"],
    "data": ["core", "sys", "config", "text"],
    "autograd": ["core", "kernels"],
    "distributed": ["core", "sys", "kernels"],
    "nn": ["core", "sys", "config", "kernels", "text", "data", "autograd"],
    "rl/engine": ["core", "sys", "config", "kernels", "text", "data", "autograd", "nn"],
    "rl": ["core", "sys", "config", "kernels", "text", "data", "autograd", "nn", "rl/engine"],
    "trainers": ["core", "sys", "config", "kernels", "text", "data", "autograd", "distributed", "nn", "rl/engine", "rl"],
    "job": ["core", "sys", "config", "kernels", "text", "data", "autograd", "distributed", "nn", "rl/engine", "rl",
            "trainers"],
}
TOPS = ["apps", "tests", "bench", "examples", "python"]

# What starts the name of a third-party header -> the files that may include it ("x/" is a folder).
LIBRARIES = {
    "spdlog/": ["core/log.cpp"],
    "fmt/": ["core/log.cpp"],
    "yaml-cpp/": ["config/node.cpp"],
    "Eigen/": ["kernels/cpu/matmul.cpp", "bench/"],  # in bench/ as a peer to be timed against
    "nlohmann/": ["text/json.cpp"],
    "pcre2.h": ["text/regex.cpp"],
    "utf8proc.h": ["text/unicode.cpp"],
    "xxhash.h": ["sys/files.cpp"],
    "curl/": ["sys/http.cpp"],
    "zlib.h": ["job/journal.cpp"],
    "png.h": ["data/png.cpp"],
    "turbojpeg.h": ["data/jpeg.cpp"],
    "CLI/": ["apps/", "bench/"],
    "gtest/": ["tests/"],
    "nanobind/": ["python/"],
    "nccl.h": ["distributed/nccl_comm_cuda.cpp"],
    "cublasLt.h": ["kernels/cuda/matmul.cpp"],
    "cupti.h": ["core/trace_cuda.cpp"],
}
# Who may hold __global__ besides kernels/: copies and fills of tensors, which are no maths, kernels
# that are there to be timed, two that hang, and one for the bits of an instruction.
KERNEL_FILES = ["core/tensor_cuda.cu", "bench/ladder/", "tests/distributed/spin_cuda.cu", "tests/kernels/exp2.cu",
                "tests/kernels/spin_limit.cu"]
# Headers of the CUDA runtime, for files that a CPU build leaves out.
CUDA_HEADERS = ["core/cuda.h", "core/launch.cuh"]
CUDA_FILE = re.compile(r"\.cuh?$|/cuda/|_cuda\.(cpp|h)$|_cuda_test\.cpp$|^core/(cuda|launch)\.")

# C and POSIX headers; those of C++ have neither a dot nor a slash.
SYSTEM = re.compile(
    r"(sys|linux|netinet|arpa)/\w+\.h$|"
    r"(unistd|fcntl|glob|pty|sched|signal|poll|dirent|dlfcn|pthread|time|termios|netdb|execinfo|cxxabi|"
    r"spawn|cpuid|immintrin|cuda\w*|mma|nvtx3/\w+)\.h$|"
    r"\w+$")

SOURCES = {".h", ".cpp", ".cu", ".cuh"}
MAX_LINES = 700
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')


def without_comments(text):
    """The text with comments and the insides of strings blanked out, line numbers kept."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())
    return token.sub(blank, text)


def within(path, place):
    """Whether a path is this file or lies in this folder ("x/")."""
    return str(path) == place or (place.endswith("/") and str(path).startswith(place))


def layer_of(path):
    """The layer of a file, or its top folder: "rl/engine" for "rl/engine/engine.h", "rl" for "rl/reward.h"."""
    parts = Path(path).parts
    return "/".join(parts[:2]) if "/".join(parts[:2]) in LAYERS else parts[0]


def check_include(path, bracket, name, folders):
    """The rule that including `name` from `path` breaks, or None."""
    layer = layer_of(path)
    if ".." in Path(name).parts:
        return 'includes are rooted: no "../"'
    top = layer_of(name)
    for prefix, places in LIBRARIES.items():
        if name == prefix or (prefix.endswith("/") and name.startswith(prefix)):
            known = any(within(path, p) for p in places)
            return None if known else f"<{name}> is known to {' and '.join(places)} only"
    if bracket == "<":
        if SYSTEM.match(name):
            return None
        return f"<{name}> has no place: add it to LIBRARIES of scripts/check_layers.py"
    if layer == "examples":
        return None  # a project of its own, with its own root
    if name in CUDA_HEADERS and not CUDA_FILE.search(str(path)):
        return f'"{name}" is for .cu, .cuh and *_cuda files: a CPU build has none of it'
    if Path(name).parts[0] not in folders:
        return f'includes are rooted: "{name}" does not start with a folder of the project'
    if layer in LAYERS and top != layer and top not in LAYERS[layer]:
        may = ", ".join(LAYERS[layer]) or "nothing"
        return f"{layer} includes {top}, and may include {may}"
    return None


def check_tree(root):
    """All broken rules, as (file, line, rule)."""
    folders = sorted({layer.split("/")[0] for layer in LAYERS} | set(TOPS))
    problems = []
    for file in sorted(f for folder in folders for f in (root / folder).rglob("*")):
        if file.suffix not in SOURCES or not file.is_file():
            continue
        path = file.relative_to(root)
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        if len(lines) > MAX_LINES:
            problems.append((path, len(lines), f"a file has at most {MAX_LINES} lines"))
        if file.suffix in (".h", ".cuh") and not re.search(r"^#pragma once$", text, re.M):
            problems.append((path, 1, "a header has #pragma once"))
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            rule = check_include(path, match[1], match[2], folders)
            if rule:
                problems.append((path, number, rule))
        if path.parts[0] != "kernels" and not any(within(path, p) for p in KERNEL_FILES):
            for number, line in enumerate(without_comments(text).splitlines(), 1):
                if "__global__" in line:
                    problems.append((path, number, "only kernels/ holds __global__"))
    return problems


# (file, its text, part of the rule it breaks); "" for a file that breaks none.
SELF_TEST = [
    ("core/a.h", "#pragma once\n#include <vector>\n#include <sys/stat.h>\n", ""),
    ("core/a.cpp", "// __global__ is for kernels/\nconst char* s = \"__global__\";\n", ""),
    ("core/log.cpp", "#include <spdlog/spdlog.h>\n#include <fmt/core.h>\n", ""),
    ("kernels/a.cu", '#include "core/a.h"\n__global__ void f() {}\n', ""),
    ("sys/files.cpp", "#define XXH_INLINE_ALL\n#include <xxhash.h>\n", ""),
    ("apps/main.cpp", '#include <CLI/CLI.hpp>\n#include "trainers/a.h"\n#include "core/a.h"\n', ""),
    ("tests/core/a_test.cpp", '#include <gtest/gtest.h>\n#include "tests/support/b.h"\n', ""),
    ("examples/x/main.cpp", '#include "core/a.h"\n#include "my_op.h"\n', ""),
    ("trainers/ok.cpp", '#include "distributed/a.h"\n#include "rl/a.h"\n', ""),
    ("core/up.cpp", '#include "kernels/a.h"\n', "core includes kernels, and may include nothing"),
    ("kernels/up.cpp", '#include "data/a.h"\n', "kernels includes data"),
    ("data/up.cpp", '#include "kernels/a.h"\n', "data includes kernels"),
    ("autograd/up.cpp", '#include "data/a.h"\n', "autograd includes data"),
    ("distributed/up.cpp", '#include "autograd/a.h"\n', "distributed includes autograd"),
    ("nn/up.cpp", '#include "distributed/a.h"\n', "nn includes distributed"),
    ("rl/up.cpp", '#include "distributed/a.h"\n', "rl includes distributed"),
    ("rl/up2.cpp", '#include "trainers/a.h"\n', "rl includes trainers"),
    ("rl/engine/up.cpp", '#include "rl/a.h"\n', "rl/engine includes rl, and may include core"),
    ("rl/engine/ok.cpp", '#include "rl/engine/a.h"\n#include "nn/a.h"\n', ""),
    ("rl/ok.cpp", '#include "rl/engine/a.h"\n', ""),
    ("nn/engine.cpp", '#include "rl/engine/a.h"\n', "nn includes rl/engine"),
    ("text/up.cpp", '#include "config/a.h"\n', "text includes config"),
    ("sys/up.cpp", '#include "text/a.h"\n', "sys includes text"),
    ("config/up.cpp", '#include "sys/a.h"\n', "config includes sys"),
    ("trainers/up2.cpp", '#include "job/a.h"\n', "trainers includes job"),
    ("trainers/up.cpp", '#include "apps/a.h"\n', "trainers includes apps"),
    ("nn/up2.cpp", '#include "tests/support/a.h"\n', "nn includes tests"),
    ("nn/up3.cpp", '#include "bench/a.h"\n', "nn includes bench"),
    ("core/dots.cpp", '#include "../core/a.h"\n', 'no "../"'),
    ("core/flat.cpp", '#include "a.h"\n', "does not start with a folder"),
    ("core/spdlog.cpp", "#include <spdlog/spdlog.h>\n", "is known to core/log.cpp only"),
    ("core/fmt.cpp", "  #  include <fmt/core.h>\n", "is known to core/log.cpp only"),
    ("apps/yaml.cpp", "#include <yaml-cpp/yaml.h>\n", "is known to config/node.cpp only"),
    ("nn/eigen.cpp", "#include <Eigen/Dense>\n", "is known to kernels/cpu/matmul.cpp and bench/ only"),
    ("rl/json.cpp", "#include <nlohmann/json.hpp>\n", "is known to text/json.cpp only"),
    ("text/pcre.cpp", "#include <pcre2.h>\n", "is known to text/regex.cpp only"),
    ("text/utf8proc.cpp", "#include <utf8proc.h>\n", "is known to text/unicode.cpp only"),
    ("trainers/cli.cpp", "#include <CLI/CLI.hpp>\n", "is known to apps/ and bench/ only"),
    ("bench/a.cpp", "#include <CLI/CLI.hpp>\n#include <Eigen/Core>\n", ""),
    ("sys/xxhash.cpp", "#include <xxhash.h>\n", "is known to sys/files.cpp only"),
    ("nn/gtest.cpp", "#include <gtest/gtest.h>\n", "is known to tests/ only"),
    ("trainers/nccl.cpp", "#include <nccl.h>\n", "is known to distributed/nccl_comm_cuda.cpp only"),
    ("core/zlib.cpp", "#include <zlib.h>\n", "is known to job/journal.cpp only"),
    ("data/image.cpp", "#include <png.h>\n", "is known to data/png.cpp only"),
    ("tests/data/a_test.cpp", "#include <turbojpeg.h>\n", "is known to data/jpeg.cpp only"),
    ("core/zstd.cpp", "#include <zstd.h>\n", "has no place"),
    ("rl/kernel.cu", "__global__ void f() {}\n", "only kernels/ holds __global__"),
    ("bench/ladder/a.cu", "__global__ void f() {}\n", ""),
    ("bench/kernel.cu", "__global__ void f() {}\n", "only kernels/ holds __global__"),
    ("core/tensor_cuda.cu", '#include "core/launch.cuh"\n__global__ void f() {}\n', ""),
    ("distributed/x_cuda.cpp", '#include "core/cuda.h"\n', ""),
    ("distributed/x.cpp", '#include "core/cuda.h"\n', "is for .cu, .cuh and *_cuda files"),
    ("nn/gemm.cpp", "#include <cublasLt.h>\n", "is known to kernels/cuda/matmul.cpp only"),
    ("nn/once.h", "struct A {};\n", "#pragma once"),
    ("nn/once.cuh", "// #pragma once\n", "#pragma once"),
    ("nn/long.cpp", "\n" * (MAX_LINES + 1), "at most 700 lines"),
    ("nn/limit.cpp", "\n" * MAX_LINES, ""),
]

if __name__ == "__main__":
    sys.exit(tree_check.run("check_layers", __doc__, check_tree, SELF_TEST))
