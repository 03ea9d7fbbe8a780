"""XCiT: attention between channels instead of between tokens (El-Nouby et al., 2021).

Parameters carry the published names, so official state dicts load as they are.

Shapes used below: B images, N = h * w patch tokens of an h x w grid, C channels, H heads, D = C / H.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nestling.backbones.class_attention import ClassAttentionBlock
from nestling.backbones.cross_covariance import cross_covariance
from nestling.backbones.features import Backbone, Features, apply_mask, check_count
from nestling.backbones.gelu import MapGelu
from nestling.backbones.layers import DropPath, LayerNorm, Mlp, init_linear
from nestling.backbones.linear import Linear
from nestling.backbones.options import check_choice, check_drop_path, check_positive, check_width
from nestling.backbones.packing import Sizes, by_size, pack, unpack
from nestling.backbones.positions import FourierPositions
from nestling.backbones.pyramid import crop_levels, level_ends, pyramid_layers, resize_levels
from nestling.backbones.registry import register
from nestling.backbones.stems import ConvStem, LinearStem


class XCA(nn.Module):
    """Cross-covariance attention (section 3.2): its cost is linear in the number of tokens.

    Every head mixes its D channels with a D x D map, softmax(t * q k^T), where q and k
    are L2-normalised over the tokens and t is a learned temperature per head.

    Shape:
        x: (B, N, C) -> (B, N, C); with `sizes` (R, C) -> (R, C)
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # B N 3 H D
        return self.proj(by_size(partial(cross_covariance, temperature=self.temperature), qkv, sizes))


class LPI(nn.Module):
    """Local patch interaction (section 3.3): lets neighbouring patches talk, which XCA doesn't.

    Tokens become an image without a copy: (B, N, C) is its channels-last layout.

    Shape:
        x: (B, N, C) -> (B, N, C)
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.act = MapGelu()
        self.bn = nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x.unflatten(1, grid).permute(0, 3, 1, 2)  # B C h w
        x = self.conv2(self.bn(self.act(self.conv1(x))))
        return x.permute(0, 2, 3, 1).flatten(1, 2)  # B N C


class XCABlock(nn.Module):
    """XCA, then LPI, then a feed-forward network, each a residual branch with its own layer scale.

    Names follow the published weights, hence 1, 3, 2 in the order of use.

    Shape:
        x: (B, N, C), grid: (h, w) -> (B, N, C); with `sizes` x (R, C), a grid for each -> (R, C)
    """

    def __init__(
        self, dim: int, num_heads: int, hidden_dim: int, layer_scale: float, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = LayerNorm(dim), LayerNorm(dim), LayerNorm(dim)
        self.attn = XCA(dim, num_heads)
        self.local_mp = LPI(dim)
        self.mlp = Mlp(dim, hidden_dim)
        self.gamma1, self.gamma2, self.gamma3 = (nn.Parameter(torch.full((dim,), layer_scale)) for _ in "123")
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, grid: tuple[int, int] | Sequence[tuple[int, int]], sizes: Sizes | None = None
    ) -> Tensor:
        x = self._add(x, self.attn(self.norm1(x), sizes), self.gamma1, sizes)
        x = self._add(x, by_size(self.local_mp, self.norm3(x), sizes, grid), self.gamma3, sizes)
        return self._add(x, self.mlp(self.norm2(x)), self.gamma2, sizes)

    def _add(self, x: Tensor, branch: Tensor, gamma: Tensor, sizes: Sizes | None = None) -> Tensor:
        if self.training and self.drop_path.drops:
            gamma = gamma * self.drop_path(branch, sizes)  # B 1 C or R C
        return torch.addcmul(x, branch, gamma)


def variants() -> dict[str, dict[str, int | float | bool]]:
    """Table 1 of the paper, times patch 16 and 8, and 4 as our extension for small images."""
    sizes = {  # width, blocks, heads, initial layer scale
        "nano_12": (128, 12, 4, 1.0),
        "tiny_12": (192, 12, 4, 1.0),
        "tiny_24": (192, 24, 4, 1e-5),
        "small_12": (384, 12, 8, 1.0),
        "small_24": (384, 24, 8, 1e-5),
        "medium_24": (512, 24, 8, 1e-5),
        "large_24": (768, 24, 16, 1e-5),
    }
    return {
        f"xcit_{size}_p{patch}": {
            "patch": patch,
            "embed_dim": dim,
            "depth": depth,
            "num_heads": heads,
            "layer_scale": scale,
            "tokens_norm": size != "nano_12",  # the published nano alone was trained without
        }
        for size, (dim, depth, heads, scale) in sizes.items()
        for patch in (16, 8, 4)
    }


@register(variants())
class XCiT(Backbone):
    """Stem and positions, `depth` XCA blocks over the patches, `cls_depth` class-attention blocks.

    `drop_path` is the same for all XCA blocks, as published. `mask_token` and `pyramid` create
    parameters that plain pretraining would leave without a gradient, so they are off by default:
    without `mask_token` a mask is refused, without `pyramid` its levels are resized without
    parameters. Raises ValueError for values that don't fit together.

    Shape:
        images: (B, in_chans, H, W), mask: (B, h, w) -> Features, h = ceil(H / patch)
    """

    def __init__(
        self,
        name: str,
        in_chans: int = 3,
        patch: int = 16,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        cls_depth: int = 2,
        drop_path: float = 0.0,
        layer_scale: float = 1.0,
        tokens_norm: bool = True,
        stem: str = "conv",
        mask_token: bool = False,
        pyramid: bool = False,
    ) -> None:
        super().__init__()
        check_positive(name, in_chans=in_chans, embed_dim=embed_dim, depth=depth, num_heads=num_heads)
        check_positive(name, cls_depth=cls_depth, mlp_ratio=mlp_ratio, layer_scale=layer_scale)
        check_choice(name, "stem", stem, ("conv", "linear"))
        check_choice(name, "patch", patch, (4, 8, 16))
        check_drop_path(name, drop_path)
        check_width(name, embed_dim, num_heads, mlp_ratio)
        if stem == "conv" and embed_dim % (patch // 2):
            raise ValueError(
                f"embed_dim={embed_dim} of {name} is not a multiple of {patch // 2}, "
                f"as the conv stem of patch {patch} needs"
            )
        self.name, self.embed_dim, self.stride, self.min_size = name, embed_dim, patch, patch
        hidden_dim = int(embed_dim * mlp_ratio)

        self.patch_embed = {"conv": ConvStem, "linear": LinearStem}[stem](in_chans, embed_dim, patch)
        self.pos_embeder = FourierPositions(embed_dim)  # the published spelling
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if mask_token else None
        self.blocks = nn.ModuleList(
            XCABlock(embed_dim, num_heads, hidden_dim, layer_scale, drop_path) for _ in range(depth)
        )
        self.cls_attn_blocks = nn.ModuleList(
            ClassAttentionBlock(embed_dim, num_heads, hidden_dim, layer_scale, tokens_norm)
            for _ in range(cls_depth)
        )
        self.norm = LayerNorm(embed_dim)
        self.has_pyramid = pyramid
        if pyramid:
            for number, layer in enumerate(pyramid_layers(patch, embed_dim), start=1):
                self.add_module(f"fpn{number}", layer)  # the published detectors' names

        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.apply(init_linear)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        patches, grid = self._embed(images, mask)
        for block in self.blocks:
            patches = self.run(block, patches, grid)
        cls = self._class_tokens(patches)
        for block in self.cls_attn_blocks:
            cls, patches = self.run(block, cls, patches)
        return Features(self.norm(cls).squeeze(1), self.norm(patches), grid)

    def image_vectors(self, images: Tensor) -> Tensor:
        """The last class-attention block leaves the patches alone. Shape: images (B, C, H, W) -> (B, D)."""
        patches, grid = self._embed(images)
        for block in self.blocks:
            patches = self.run(block, patches, grid)
        return self._gathered(patches)

    def view_vectors(self, views: Sequence[Tensor]) -> list[Tensor]:
        """All crop sizes share a call of each XCA block. Shape: V of (B, C, H, W) -> V of (B, D)."""
        if len(views) == 1:
            return super().view_vectors(views)
        parts, grids = zip(*map(self._embed, views), strict=True)
        x, sizes = pack(parts)
        for block in self.blocks:
            x = self.run(block, x, grids, sizes)
        return [self._gathered(patches) for patches in unpack(x, sizes)]

    def _gathered(self, patches: Tensor) -> Tensor:
        """What the class token makes of the last XCA block's patches. Shape: (B, N, C) -> (B, C)."""
        cls = self._class_tokens(patches)
        for number, block in enumerate(self.cls_attn_blocks, start=1):
            cls, patches = self.run(block, cls, patches, number == len(self.cls_attn_blocks))
        return self.norm(cls.squeeze(1))

    def last_blocks(self, images: Tensor, count: int) -> list[Features]:
        """The class-attention blocks count too; those before them have the mean patch as `cls`.

        Shape:
            images: (B, C, H, W) -> `count` of Features
        """
        check_count(self.name, count, len(self.blocks) + len(self.cls_attn_blocks))
        first_kept = len(self.blocks) + len(self.cls_attn_blocks) - count
        patches, grid = self._embed(images)
        found = []
        for number, block in enumerate(self.blocks):
            patches = self.run(block, patches, grid)
            if number >= first_kept:
                normalised = self.norm(patches)
                found.append(Features(normalised.mean(1), normalised, grid))
        cls = self._class_tokens(patches)
        for number, block in enumerate(self.cls_attn_blocks, start=len(self.blocks)):
            cls, patches = self.run(block, cls, patches)
            if number >= first_kept:
                found.append(Features(self.norm(cls).squeeze(1), self.norm(patches), grid))
        return found

    def attention(self, images: Tensor) -> Tensor:
        """The last class-attention layer's softmax, without the share the class token gives itself.

        So the weights of a head sum to at most 1.

        Shape:
            images: (B, C, H, W) -> (B, heads, h, w)
        """
        patches, grid = self._embed(images)
        for block in self.blocks:
            patches = self.run(block, patches, grid)
        cls = self._class_tokens(patches)
        for block in self.cls_attn_blocks[:-1]:
            cls, patches = block(cls, patches)
        last = self.cls_attn_blocks[-1]
        assert isinstance(last, ClassAttentionBlock)
        return last.attention(cls, patches)[..., 1:].unflatten(-1, grid)

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Maps after a third, a half, two thirds and all of the blocks, as in the published detectors.

        Resized by their layers where built with `pyramid=True`, else without parameters.

        Shape:
            images: (B, C, H, W) -> four of (B, D, ceil(H / s), ceil(W / s)), s = 4, 8, 16, 32
        """
        patches, grid = self._embed(images)
        outputs = []
        for block in self.blocks:
            patches = self.run(block, patches, grid)
            outputs.append(patches)
        maps = [
            outputs[end - 1].unflatten(1, grid).permute(0, 3, 1, 2) for end in level_ends(len(self.blocks))
        ]
        if self.has_pyramid:
            levels = [self.get_submodule(f"fpn{number}")(x) for number, x in enumerate(maps, start=1)]
        else:
            levels = resize_levels(maps, self.stride)
        return crop_levels(levels, *images.shape[-2:])

    def no_weight_decay(self) -> set[str]:
        """Tokens, layer scales and XCA's temperature; the position encoding has no table to spare."""
        spared = ("cls_token", "mask_token", "gamma1", "gamma2", "gamma3", "temperature")
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in spared}

    def _embed(self, images: Tensor, mask: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        self.check_size(*images.shape[-2:])
        x = self.patch_embed(images)  # B C h w
        grid = (x.shape[2], x.shape[3])
        x = x.flatten(2).mT  # B N C
        if mask is not None:
            x = apply_mask(x, mask, grid, self.mask_token, self.name)
        return x + self.pos_embeder(grid), grid

    def _class_tokens(self, patches: Tensor) -> Tensor:
        """Laid out as a class-attention block's output, so that all of them share one compiled graph."""
        return self.cls_token.expand(patches.shape[0], -1, -1).contiguous()  # len() would fix B on export
