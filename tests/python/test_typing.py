"""What type checkers, editors and inspect see: stubs with every name, signatures, docstrings."""
import ast
import inspect
import json
import pathlib
import re
import subprocess
import sys

import cohort
import pytest
from cohort import ops

CLASSES = [cohort.Callback, cohort.Engine, cohort.Follow, cohort.Model, cohort.Progress, cohort.Rollouts, cohort.TrainResult]


def test_mypy_strict_passes_on_every_public_name(tmp_path):
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed")
    path = pathlib.Path(__file__).with_name("public_names.py")
    names = {name for members in (cohort.__all__, ops.__all__, *map(dir, [*CLASSES, cohort.Tensor])) for name in members}
    names -= {"rollout_arrays", "each_logprobs", "each_embedding", "export_folder"}  # what other methods call
    unused = [name for name in names if not name.startswith("_") and not re.search(rf"\b{name}\b", path.read_text())]
    assert not unused
    output, errors, status = mypy.run(["--strict", "--no-error-summary", "--cache-dir", str(tmp_path), str(path)])
    assert status == 0, output + errors


def test_pyright_passes_on_every_public_name(tmp_path):
    pyright = pathlib.Path(sys.executable).with_name("basedpyright")
    if not pyright.exists():
        pytest.skip("basedpyright is not installed")
    config = {"include": [str(pathlib.Path(__file__).with_name("public_names.py"))], "typeCheckingMode": "standard",
              "pythonVersion": "3.10"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run([pyright, "-p", tmp_path, "--pythonpath", sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_stub_of_ops_has_the_functions_of_the_module():
    stub = ast.parse(pathlib.Path(ops.__file__).with_suffix(".pyi").read_text())
    functions = {node.name: ast.get_docstring(node) for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert sorted(functions) == sorted(ops.__all__) and all(functions.values())
    # One of each list in kernels/elementwise.h, and one that is bound by itself.
    assert {"gelu_tanh", "div", "geglu", "flash_attention"} <= set(functions)


@pytest.mark.parametrize("public", CLASSES)
def test_classes_have_signatures_and_docstrings(public):
    assert inspect.signature(public) is not None and inspect.getdoc(public)


def test_the_engine_spells_out_its_limits():
    assert list(inspect.signature(cohort.Engine).parameters) == ["model", "max_concurrent", "memory_fraction", "max_cache_tokens"]
    for method in (cohort.Model.generate, cohort.Engine.rollouts, cohort.Tensor.numpy, ops.flash_attention):
        assert inspect.getdoc(method)
