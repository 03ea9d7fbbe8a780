"""What a user sets for dense evaluations; the defaults are those published.

DINOv2's linear head (its ADE20K configuration): crops of 512 pixels in batches of 16, 40,000 steps of AdamW
at 1e-3 with weight decay 1e-4, warm-up of 1,500 steps, then a straight line to 0. Patch k-NN follows
Hummingbird (Balazevic et al., 2023): 30 neighbours, temperature 0.02; its memory of 10,240,000 patches is cut
to a tenth, which a workstation holds. Label propagation has the settings of DINO's DAVIS evaluation.
"""

from dataclasses import dataclass

from nestling.ssl.config import key


@dataclass
class Linear:
    """How the linear layer learns."""

    lr: float = key(1e-3, "AdamW's learning rate at its peak", low=0)
    weight_decay: float = key(1e-4, "pulls the weights towards 0", low=0)
    steps: int = key(40_000, "batches of crops", low=1)
    warmup_steps: int = key(1_500, "steps in which the learning rate rises, before it falls to 0", low=0)
    batch_size: int = key(16, "crops per step", low=1)


@dataclass
class PatchKnn:
    """How patches vote."""

    k: int = key(30, "patches that vote", low=1)
    temperature: float = key(0.02, "votes weigh exp(similarity / temperature)", low=1e-3)
    memory: int = key(1_024_000, "training patches that can vote, drawn evenly from all images", low=1)


@dataclass
class Propagation:
    """Where a patch of a frame has its label from."""

    last_frames: int = key(7, "frames before that are sources beside the first one", low=0)
    topk: int = key(5, "most similar patches that hand on their label", low=1)
    radius: int = key(12, "rows and columns of patches that a source is away at most; 0: any", low=0)
    temperature: float = key(0.1, "a source weighs exp(similarity / temperature)", low=1e-3)
