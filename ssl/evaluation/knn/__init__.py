"""k-nearest-neighbour classification of frozen features: who is near, who is voted for, and how well."""

from nestling.ssl.evaluation.knn.exact import search
from nestling.ssl.evaluation.knn.voting import effective_ks, knn

__all__ = ["effective_ks", "knn", "search"]
