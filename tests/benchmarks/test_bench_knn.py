"""The comparison of k-NN with its peers, small, and that a differing prediction stops it."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
def test_the_knn_benchmark_runs_and_its_rows_are_named(repository, tmp_path):
    script = repository / "benchmarks/knn.py"
    command = [sys.executable, script, "--quick", "--threads", "1", "--device", "cpu", "--json", "rows.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["part"], row["peer"], row["at_least"]) for row in rows] == [
        ("k-NN 1000 x 100 x 384, torch", "one search per k, torch", None),
        ("k-NN 1000 x 100 x 384, torch", "one search per k, faiss", None),
        ("k-NN 1000 x 100 x 384, faiss", "one search per k, torch", None),
        ("k-NN 1000 x 100 x 384, faiss", "one search per k, faiss", None),
        ("k-NN 2000 x 200 x 384, torch", "one search per k, torch", 4),
    ]


def test_a_prediction_that_differs_stops_it(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    spec = importlib.util.spec_from_file_location("knn_benchmark", repository / "benchmarks/knn.py")
    monkeypatch.setitem(sys.modules, spec.name, module := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    sides = module.Sides.drawn(300, 20, torch.device("cpu"))

    def wrong(sides):
        predicted = module.by_matrix_products(sides)
        predicted[100][3] += 1
        return predicted

    with pytest.raises(ValueError, match="k=100: 1 of 20 predictions differ"):
        module.check(sides, wrong, module.by_matrix_products)
    module.check(sides, module.by_matrix_products, module.by_matrix_products)
