"""A protocol by its name."""

from collections.abc import Callable

from nestling.ssl.evaluation.linear.augmented import Augmented
from nestling.ssl.evaluation.linear.cached import Cached, Logistic
from nestling.ssl.evaluation.linear.probe import Learner
from nestling.ssl.evaluation.linear.settings import PROTOCOLS
from nestling.ssl.evaluation.linear.task import Task


def learner_of(protocol: str, task: Task) -> Learner:
    """How the heads learn. All processes must call it: `cached` and `logreg` compute the features here.

    Raises:
        UserError: a setting that the protocol can't follow, or what the features raise.
    """
    kinds: tuple[Callable[[Task], Learner], ...] = (Cached, Augmented, Logistic)
    return dict(zip(PROTOCOLS, kinds, strict=True))[protocol](task)
