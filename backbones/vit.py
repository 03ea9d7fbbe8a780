"""ViT: the plain vision transformer (Dosovitskiy et al., 2021) as DINO, DINOv2 and DINOv3 build it.

Parameters carry the names of DINO's and DINOv2's files, so these state dicts load as they are.

Shapes used below: B images, N = h * w patches of an h x w grid, P = 1 + registers tokens before them,
T = P + N tokens, C channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nestling.backbones.features import Backbone, Features, apply_mask, check_count
from nestling.backbones.layers import LayerNorm, init_linear
from nestling.backbones.options import (
    check_choice,
    check_drop_path,
    check_not_negative,
    check_positive,
    check_unread,
    check_width,
)
from nestling.backbones.packing import pack, unpack
from nestling.backbones.position_table import resize_positions
from nestling.backbones.positions import sincos2d
from nestling.backbones.pyramid import fit_levels, level_ends, pyramid_layers, resize_levels
from nestling.backbones.registry import register
from nestling.backbones.rope import AxialRope
from nestling.backbones.self_attention import Block


class PatchEmbedding(nn.Module):
    """Patches that don't overlap, each projected linearly (section 3.1).

    Shape:
        images: (B, in_chans, H, W) -> (B, C, H / patch, W / patch)
    """

    def __init__(self, in_chans: int, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images)


def variants() -> dict[str, dict[str, int | float | str]]:
    """The sizes of ViT and DeiT, and DINOv2's giant, times patch 16, 14 and 8."""
    sizes: dict[str, dict[str, int | float | str]] = {
        "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
        "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
        "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
        "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
        "giant": {"embed_dim": 1536, "depth": 40, "num_heads": 24, "ffn": "swiglu", "layer_scale": 1e-5},
    }
    return {
        f"vit_{size}_p{patch}": {"patch": patch, **options}
        for size, options in sizes.items()
        for patch in (16, 14, 8)
    }


@register(variants())
class ViT(Backbone):
    """Patches, a class token and `registers` more (Darcet et al., 2024) through `depth` blocks.

    `position` is `learned` (a table made for images of `position_size` pixels a side, read as
    `resize_positions` says), `sincos2d` (MAE's, fixed), `rope` (DINOv3's, in every block) or `none`;
    registers have none. Drop path rises linearly from 0 over the blocks. `layer_scale` is its initial
    value, 0 leaves it out. `mask_token` and `pyramid` create parameters that plain pretraining would
    leave without a gradient, so they are off by default: without `mask_token` a mask is refused, without
    `pyramid` its levels are resized without parameters. Raises ValueError for values that don't fit together.

    Shape:
        images: (B, in_chans, H, W), mask: (B, h, w) -> Features, h = H / patch
    """

    def __init__(
        self,
        name: str,
        in_chans: int = 3,
        patch: int = 16,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        ffn: str = "mlp",
        drop_path: float = 0.0,
        layer_scale: float = 0.0,
        registers: int = 0,
        mask_token: bool = False,
        position: str = "learned",
        position_size: int = 224,
        interpolate_offset: float = 0.0,
        interpolate_antialias: bool = False,
        rope_base: float = 100.0,
        rope_shift: float = 0.0,
        rope_jitter: float = 1.0,
        rope_rescale: float = 1.0,
        pyramid: bool = False,
    ) -> None:
        super().__init__()
        check_positive(name, in_chans=in_chans, patch=patch, embed_dim=embed_dim, depth=depth)
        check_positive(name, num_heads=num_heads, mlp_ratio=mlp_ratio)
        check_not_negative(name, layer_scale=layer_scale, registers=registers)
        check_choice(name, "ffn", ffn, ("mlp", "swiglu"))
        check_drop_path(name, drop_path)
        check_width(name, embed_dim, num_heads, mlp_ratio)
        _check_position(name, position, embed_dim, num_heads, patch, position_size)
        rope = (rope_base, rope_shift, rope_jitter, rope_rescale)
        _check_unread(name, position, (interpolate_offset, interpolate_antialias), rope)
        self.name, self.embed_dim, self.stride, self.min_size = name, embed_dim, patch, patch
        hidden_dim = int(embed_dim * mlp_ratio)
        rates = [drop_path * number / max(1, depth - 1) for number in range(depth)]

        self.patch_embed = PatchEmbedding(in_chans, embed_dim, patch)
        self._add_tokens(registers, mask_token, (position_size // patch) ** 2 if position == "learned" else 0)
        self.position, self.offset, self.antialias = position, interpolate_offset, interpolate_antialias
        self.rope = AxialRope(name, embed_dim // num_heads, *rope) if position == "rope" else None
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, hidden_dim, qkv_bias, ffn, layer_scale, rate) for rate in rates
        )
        self.norm = LayerNorm(embed_dim)
        self.has_pyramid = pyramid
        if pyramid:
            for number, layer in enumerate(pyramid_layers(patch, embed_dim), start=1):
                self.add_module(f"fpn{number}", layer)  # the published detectors' names

        self.apply(init_linear)

    def _add_tokens(self, registers: int, mask_token: bool, positions: int) -> None:
        """Class, register and mask token, and a table of positions for the class and that many patches."""
        dim = self.embed_dim
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.register_tokens = nn.Parameter(torch.empty(1, registers, dim)) if registers else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim)) if mask_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + positions, dim)) if positions else None
        for tokens in (self.cls_token, self.register_tokens, self.pos_embed):
            if tokens is not None:
                nn.init.trunc_normal_(tokens, std=0.02)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        x, grid, rope = self._embed(images, mask)
        for block in self.blocks:
            x = self.run(block, x, rope)
        x = self.norm(x)
        return Features(x[:, 0], x[:, self._num_prefix :], grid)

    def image_vectors(self, images: Tensor) -> Tensor:
        """The last block computes its class token alone. Shape: images (B, C, H, W) -> (B, D)."""
        x, _, rope = self._embed(images)
        for block in self.blocks[:-1]:
            x = self.run(block, x, rope)
        return self._gathered(x, rope)

    def view_vectors(self, views: Sequence[Tensor]) -> list[Tensor]:
        """All crop sizes share a call of each block but the last. Shape: V of (B, C, H, W) -> V of (B, D)."""
        if len(views) == 1:
            return super().view_vectors(views)
        parts, _, ropes = zip(*map(self._embed, views), strict=True)
        x, sizes = pack(parts)
        for block in self.blocks[:-1]:
            x = self.run(block, x, ropes, False, sizes)
        return [self._gathered(part, rope) for part, rope in zip(unpack(x, sizes), ropes, strict=True)]

    def _gathered(self, x: Tensor, rope: Tensor | None) -> Tensor:
        """The class token alone after the last block. Shape: x (B, T, C) -> (B, C)."""
        return self.norm(self.run(self.blocks[-1], x, rope, True)[:, 0])

    def last_blocks(self, images: Tensor, count: int) -> list[Features]:
        """Each through the final norm. Shape: images (B, C, H, W) -> `count` of Features."""
        check_count(self.name, count, len(self.blocks))
        x, grid, rope = self._embed(images)
        found = []
        for number, block in enumerate(self.blocks, start=1):
            x = self.run(block, x, rope)
            if number > len(self.blocks) - count:
                normalised = self.norm(x)
                found.append(Features(normalised[:, 0], normalised[:, self._num_prefix :], grid))
        return found

    def attention(self, images: Tensor) -> Tensor:
        """The last block's softmax, without what the class token gives itself and the registers.

        So the weights of a head sum to at most 1.

        Shape:
            images: (B, C, H, W) -> (B, heads, h, w)
        """
        x, grid, rope = self._embed(images)
        for block in self.blocks[:-1]:
            x = self.run(block, x, rope)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return last.class_attention(x, rope)[..., self._num_prefix :].unflatten(-1, grid)

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Maps after a third, a half, two thirds and all of the blocks, as in the detectors of BEiT and XCiT.

        Resized by their layers where built with `pyramid=True`, else without parameters.

        Shape:
            images: (B, C, H, W) -> four of (B, D, ceil(H / s), ceil(W / s)), s = 4, 8, 16, 32
        """
        x, grid, rope = self._embed(images)
        outputs = []
        for block in self.blocks:
            x = self.run(block, x, rope)
            outputs.append(x[:, self._num_prefix :])
        maps = [
            outputs[end - 1].unflatten(1, grid).permute(0, 3, 1, 2) for end in level_ends(len(self.blocks))
        ]
        if not self.has_pyramid:
            return resize_levels(maps, self.stride)
        levels = [self.get_submodule(f"fpn{number}")(x) for number, x in enumerate(maps, start=1)]
        return fit_levels(levels, self.stride, *images.shape[-2:])

    def check_size(self, height: int, width: int) -> None:
        """Raises ValueError for a side that is no multiple of the patch, naming the nearest that are."""
        wrong = [
            f"{side} {_nearest_multiples(length, self.stride)}"
            for side, length in (("height", height), ("width", width))
            if length < self.stride or length % self.stride
        ]
        if wrong:
            raise ValueError(
                f"{self.name} takes images whose sides are multiples of {self.stride} pixels, not "
                f"{height} x {width} (height x width); the nearest sizes that work are {' and '.join(wrong)}"
            )

    def no_weight_decay(self) -> set[str]:
        """Tokens, the position table and layer scales."""
        spared = ("cls_token", "register_tokens", "mask_token", "pos_embed", "gamma")
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in spared}

    @property
    def _num_prefix(self) -> int:
        return 1 if self.register_tokens is None else 1 + self.register_tokens.shape[1]

    def _embed(
        self, images: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """Shape: returns (B, T, C), the grid (h, w), and where rotary (2, T, D / 2)."""
        self.check_size(*images.shape[-2:])
        x = self.patch_embed(images)  # B C h w
        grid = (x.shape[2], x.shape[3])
        x = x.flatten(2).mT  # B N C
        if mask is not None:
            x = apply_mask(x, mask, grid, self.mask_token, self.name)
        prefix: Tensor = self.cls_token
        if self.pos_embed is not None:
            position_cls, table = self.pos_embed[:, :1], self.pos_embed[0, 1:]
            x, prefix = x + resize_positions(table, grid, self.offset, self.antialias), prefix + position_cls
        if self.position == "sincos2d":
            x = x + sincos2d(grid, self.embed_dim, x.device).to(prefix.dtype)
        if self.register_tokens is not None:
            prefix = torch.cat([prefix, self.register_tokens], dim=1)
        x = torch.cat([prefix.expand(x.shape[0], -1, -1), x], dim=1)
        rope = None if self.rope is None else self.rope(grid, self._num_prefix, x.device, x.dtype)
        return x, grid, rope


def _check_position(name: str, position: str, dim: int, num_heads: int, patch: int, size: int) -> None:
    check_choice(name, "position", position, ("learned", "sincos2d", "rope", "none"))
    if position == "learned" and (size < patch or size % patch):
        raise ValueError(
            f"position_size={size} of {name} is not a multiple of patch={patch}; "
            f"the nearest that work are {_nearest_multiples(size, patch)}"
        )
    if position == "sincos2d" and dim % 4:
        raise ValueError(f"embed_dim={dim} of {name} is not a multiple of 4, as position=sincos2d needs")
    if position == "rope" and dim // num_heads % 4:
        raise ValueError(
            f"embed_dim / num_heads of {name} is {dim // num_heads}, no multiple of 4 as position=rope needs"
        )


def _check_unread(
    name: str, position: str, table: tuple[float, bool], rope: tuple[float, float, float, float]
) -> None:
    """Settings of another position encoding than the one chosen."""
    (offset, antialias), (base, shift, jitter, rescale) = table, rope
    check_not_negative(name, interpolate_offset=offset)
    reason = f"with position={position}"
    if position != "learned":
        check_unread(name, reason, interpolate_offset=(offset, 0.0), interpolate_antialias=(antialias, False))
    if position != "rope":
        check_unread(name, reason, rope_base=(base, 100.0), rope_shift=(shift, 0.0))
        check_unread(name, reason, rope_jitter=(jitter, 1.0), rope_rescale=(rescale, 1.0))


def _nearest_multiples(length: int, step: int) -> str:
    below = length // step * step
    return f"{below} or {below + step}" if below else str(step)
