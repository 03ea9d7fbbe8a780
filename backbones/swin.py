"""Swin: attention within windows that shift from block to block (Liu et al., 2021).

Parameters carry the published names, so the state dicts of Swin and EsViT load as they are.

Shapes used below: B images, h x w grid of tokens of a stage, C channels.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.features import Backbone, Features, apply_mask, check_count
from nestling.backbones.layers import DropPath, Mlp, init_linear
from nestling.backbones.linear import Linear
from nestling.backbones.options import check_choice, check_drop_path, check_positive, check_width
from nestling.backbones.packing import Sizes, by_size, pack, unpack
from nestling.backbones.position_table import resize_positions
from nestling.backbones.registry import register
from nestling.backbones.symbolic_windows import settle
from nestling.backbones.window_attention import WindowAttention

EPS = 1e-5
LayerNorm = partial(nn.LayerNorm, eps=EPS)


class PatchEmbedding(nn.Module):
    """Patches from one linear projection, normalised (section 3.1).

    An image whose sides are no multiples of the patch is padded with zeros at the bottom and right.

    Shape:
        images: (B, in_chans, H, W) -> (B, ceil(H / patch), ceil(W / patch), C)
    """

    def __init__(self, in_chans: int, dim: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(in_chans, dim, patch, stride=patch)
        self.norm = LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        if any(isinstance(side, torch.SymInt) or side % self.patch for side in images.shape[-2:]):
            # enough for any size, since the convolution leaves out what is too much
            images = F.pad(images, (0, self.patch - 1, 0, self.patch - 1))
        return self.norm(self.proj(images).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Every 2 x 2 tokens become one of twice the width (section 3.1); an odd grid is padded with zeros.

    Shape:
        x: (B, h, w, C) -> (B, ceil(h / 2), ceil(w / 2), 2 C); with `sizes` (R, C) -> (ca. R / 4, 2 C)
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * dim)
        self.reduction = Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        return self.reduction(self.norm(by_size(neighbours, x, sizes)))


def neighbours(x: Tensor) -> Tensor:
    """Every 2 x 2 tokens as one. Shape: (B, h, w, C) -> (B, ceil(h / 2), ceil(w / 2), 4 C)."""
    if any(isinstance(side, torch.SymInt) or side % 2 for side in x.shape[1:3]):
        x = F.pad(x, (0, 0, 0, 1, 0, 1))  # `unfold` leaves out what is too much
    x = x.unfold(1, 2, 2).unfold(2, 2, 2)  # B h/2 w/2 C rows columns
    return x.permute(0, 1, 2, 5, 4, 3).flatten(3)  # as published, columns before rows


class SwinBlock(nn.Module):
    """Window attention, then a feed-forward network, both residual (equation 3).

    Shape:
        x: (B, h, w, C) -> (B, h, w, C); with `sizes` (R, C) -> (R, C)
    """

    def __init__(self, attention: WindowAttention, dim: int, hidden_dim: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim)
        self.attn = attention
        self.mlp = Mlp(dim, hidden_dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        x = self._add(x, self.attn(self.norm1(x), sizes), sizes)
        return self._add(x, self.mlp(self.norm2(x)), sizes)

    def _add(self, x: Tensor, branch: Tensor, sizes: Sizes | None = None) -> Tensor:
        if self.training and self.drop_path.drops:
            factor = self.drop_path(branch, sizes)  # B 1 1 or R 1
            return torch.addcmul(x, branch, factor[..., None] if sizes is None else factor)
        return x + branch


class Stage(nn.Module):
    """Blocks of one width, every second one shifted, and the merging that ends all stages but the last."""

    def __init__(self, blocks: list[SwinBlock], downsample: PatchMerging | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample: PatchMerging | None = downsample


def variants() -> dict[str, dict[str, int | float | bool]]:
    """Section 3.3, "architecture variants", times window 7 and 14 (EsViT's)."""
    sizes = {"tiny": (96, 6, 3), "small": (96, 18, 3), "base": (128, 18, 4), "large": (192, 18, 6)}
    return {
        f"swin_{size}_w{window}": {"embed_dim": dim, "depth": depth, "num_heads": heads, "window": window}
        for size, (dim, depth, heads) in sizes.items()
        for window in (7, 14)
    }


@register(variants())
class Swin(Backbone):
    """Patch embedding and four stages of 2, 2, `depth` and 2 blocks, each of half the grid, twice the width.

    `embed_dim` and `num_heads` are the first stage's; the attribute `embed_dim` is the last stage's. `cls`
    is the mean of the normalised patches, so `attention` is refused. `position` is the paper's ablation
    (table 4): a bias by offset, a table over the grid of images of `position_size` pixels, both or none.

    Grids are padded to whole windows, then shifted. `padding="masked"` gives padded tokens no attention
    weight, and shrinks the window to a smaller grid. `padding="attended"` is what the published weights
    were trained with: torchvision's at all sizes; EsViT's too, but for a grid within one window, where
    EsViT shifts or not by the size it was built for. Both settings agree where no grid needs padding: at
    multiples of 224 pixels for a window of 7, and of 448 for 14. timm shifts before it pads, and so agrees
    there only. Raises ValueError for values that don't fit together.

    Shape:
        images: (B, in_chans, H, W), mask: (B, h, w) -> Features, h = ceil(H / (8 patch))
    """

    has_attention = False

    def __init__(
        self,
        name: str,
        in_chans: int = 3,
        patch: int = 4,
        embed_dim: int = 96,
        depth: int = 6,
        num_heads: int = 3,
        window: int = 7,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_path: float = 0.0,
        position: str = "relative",
        position_size: int = 224,
        padding: str = "masked",
        mask_token: bool = False,
        pyramid: bool = False,
    ) -> None:
        super().__init__()
        check_positive(name, in_chans=in_chans, patch=patch, embed_dim=embed_dim, depth=depth)
        check_positive(name, num_heads=num_heads, window=window, mlp_ratio=mlp_ratio)
        check_positive(name, position_size=position_size)
        check_choice(name, "position", position, ("relative", "absolute", "both", "none"))
        check_choice(name, "padding", padding, ("masked", "attended"))
        check_drop_path(name, drop_path)
        check_width(name, embed_dim, num_heads, mlp_ratio)
        self.name, self.embed_dim, self.stride, self.min_size = name, 8 * embed_dim, 8 * patch, patch
        self.has_pyramid = pyramid
        widths, depths = [embed_dim << stage for stage in range(4)], [2, 2, depth, 2]
        rates = iter(torch.linspace(0, drop_path, sum(depths), dtype=torch.float64, device="cpu").tolist())
        relative = position in ("relative", "both")

        def block(stage: int, number: int) -> SwinBlock:
            dim, shifted = widths[stage], number % 2 == 1
            heads = num_heads << stage
            attention = WindowAttention(dim, heads, window, shifted, padding == "masked", relative, qkv_bias)
            return SwinBlock(attention, dim, int(dim * mlp_ratio), next(rates))

        self.patch_embed = PatchEmbedding(in_chans, embed_dim, patch)
        self.absolute_pos_embed: nn.Parameter | None = None
        if position in ("absolute", "both"):
            self.absolute_pos_embed = nn.Parameter(
                torch.empty(1, (-(-position_size // patch)) ** 2, embed_dim)
            )
            nn.init.trunc_normal_(self.absolute_pos_embed, std=0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if mask_token else None
        self.layers = nn.ModuleList(
            Stage(
                [block(stage, number) for number in range(depths[stage])],
                PatchMerging(widths[stage]) if stage < 3 else None,
            )
            for stage in range(4)
        )
        self.norm = LayerNorm(self.embed_dim)
        if pyramid:
            for stage, dim in enumerate(widths):
                self.add_module(f"norm{stage}", LayerNorm(dim))  # the published detectors' names
        self.apply(init_linear)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        return self._features(self._stages(images, mask)[-1])

    def view_vectors(self, views: Sequence[Tensor]) -> list[Tensor]:
        """All crop sizes share a call of each block. Shape: V of (B, C, H, W) -> V of (B, D)."""
        if len(views) == 1:
            return super().view_vectors(views)
        x, sizes = pack([self._embed(images, None) for images in views], dims=3)
        for stage in self._layers():
            for block in stage.blocks:
                x = self.run(block, x, sizes)
            if stage.downsample is not None:
                x = stage.downsample(x, sizes)
                sizes = tuple((images, (h + 1) // 2, (w + 1) // 2) for images, h, w in sizes)
        return [patches.flatten(1, 2).mean(1) for patches in unpack(self.norm(x), sizes)]

    def last_blocks(self, images: Tensor, count: int) -> list[Features]:
        """Those of the last stage through the final norm, earlier ones by a norm without parameters.

        Shape:
            images: (B, C, H, W) -> `count` of Features, of the width of their stage
        """
        check_count(self.name, count, sum(len(stage.blocks) for stage in self._layers()))
        x = self._embed(images, None)
        kept = []
        for stage in self._layers():
            for block in stage.blocks:
                x = self.run(block, x)
                kept.append(x)
                del kept[: max(0, len(kept) - count)]
            if stage.downsample is not None:
                x = stage.downsample(x)
        return [self._features(x) for x in kept]

    def _features(self, x: Tensor) -> Features:
        """Shape: a block's (B, h, w, C) -> Features."""
        is_last = x.shape[-1] == self.embed_dim
        x = self.norm(x) if is_last else F.layer_norm(x, x.shape[-1:], eps=EPS)
        patches = x.flatten(1, 2)
        return Features(patches.mean(1), patches, (x.shape[1], x.shape[2]))

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """The four stages' outputs before they are merged, each normalised, as in the published detectors.

        By layers of their own where built with `pyramid=True`, else without parameters. Strides 4, 8, 16
        and 32 are those of patch 4.

        Shape:
            images: (B, C, H, W) -> four of (B, 2^i embed_dim, ceil(H / s), ceil(W / s)), s = 2^i patch
        """
        levels = []
        for stage, x in enumerate(self._stages(images)):
            if self.has_pyramid:
                x = self.get_submodule(f"norm{stage}")(x)
            else:
                x = F.layer_norm(x, x.shape[-1:], eps=EPS)
            levels.append(x.permute(0, 3, 1, 2))
        return levels

    def attention(self, images: Tensor) -> Tensor:
        """Raises ValueError: no token of Swin attends to the whole image."""
        raise ValueError(
            f"{self.name} has no class token, so it has no class-token attention; "
            "attention maps come from the vit and xcit families"
        )

    def no_weight_decay(self) -> set[str]:
        """The mask token and both kinds of position table."""
        spared = ("mask_token", "absolute_pos_embed", "relative_position_bias_table")
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in spared}

    def _stages(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """What each stage puts out before merging. Shape: four of (B, h, w, C)."""
        x = self._embed(images, mask)
        outputs = []
        for stage in self._layers():
            for block in stage.blocks:
                x = self.run(block, x)
            outputs.append(x)
            if stage.downsample is not None:
                x = stage.downsample(x)
        return outputs

    def _layers(self) -> list[Stage]:
        return [stage for stage in self.layers if isinstance(stage, Stage)]

    def _embed(self, images: Tensor, mask: Tensor | None) -> Tensor:
        self.check_size(*images.shape[-2:])
        settle(*images.shape[-2:])
        x = self.patch_embed(images)  # B h w C
        grid = (x.shape[1], x.shape[2])
        if mask is not None:
            mask = self._fine_mask(mask, grid, x.shape[0])
            x = apply_mask(x.flatten(1, 2), mask, grid, self.mask_token, self.name).view_as(x)
        if self.absolute_pos_embed is not None:
            x = x + resize_positions(self.absolute_pos_embed[0], grid).view(*grid, -1)
        return x

    def _fine_mask(self, mask: Tensor, grid: tuple[int, int], batch: int) -> Tensor:
        """A masked patch of the last grid masks its 8 x 8 patches of the first, or those inside the image.

        Shape:
            mask: (B, ceil(h / 8), ceil(w / 8)) -> (B, h, w)
        """
        expected = (batch, (grid[0] + 7) // 8, (grid[1] + 7) // 8)
        if mask.shape != expected or mask.dtype != torch.bool:
            found = f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise ValueError(f"the mask must be torch.bool of shape {expected}, not {found}")
        return mask.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, : grid[0], : grid[1]]
