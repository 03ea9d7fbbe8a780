"""The comparison of k-NN with its peers is stopped by a differing prediction."""

import importlib.util
import sys

import pytest
import torch


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
