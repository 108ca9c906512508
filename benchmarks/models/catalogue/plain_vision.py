"""Vision models of plain torch: segmentation, diffusion, detection and generation."""

from __future__ import annotations

import torch
from benchmarks.models.case import Batch, Case, classes, noise, tokens
from benchmarks.models.catalogue.losses import cross_entropy
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody does


class UNet(nn.Module):
    """Skips around a bottleneck, all parts as attributes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enc1, self.enc2 = self._block(3, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.dec2 = self._block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.dec1 = self._block(2 * width, width)
        self.head = nn.Conv2d(width, 5, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        e1 = self.enc1(x)
        e2 = self.enc2(F.max_pool2d(e1, 2))
        m = self.middle(F.max_pool2d(e2, 2))
        d2 = self.dec2(torch.cat([self.up2(m), e2], dim=1))
        d1 = self.dec1(torch.cat([self.up1(d2), e1], dim=1))
        return self.head(d1)  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Convolutions with the embedding of the time between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.time, self.drop = nn.Linear(time, after), nn.Dropout(0.1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(self.drop(F.silu(self.norm2(y))))  # type: ignore[no-any-return]


class CrossAttentionBlock(nn.Module):
    """Pixels attend to each other, then to the words of the prompt."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.itself = nn.MultiheadAttention(width, 4, batch_first=True)
        self.words = nn.MultiheadAttention(width, 4, kdim=context, vdim=context, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        z = self.norm1(y)
        y = y + self.itself(z, z, z, need_weights=False)[0]
        y = y + self.words(self.norm2(y), context, context, need_weights=False)[0]
        return (y + self.feed(y)).transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


class DiffusionUNet(nn.Module):
    """The U-Net of Stable Diffusion: time, cross-attention, and a stack of skips."""

    def __init__(self, width: int = 8, context: int = 12, time: int = 16) -> None:
        super().__init__()
        self.width = width
        wide = 2 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(
            [ResidualBlock(width, width, time), ResidualBlock(width, wide, time)]
        )
        self.down_attention = nn.ModuleList(CrossAttentionBlock(n, context) for n in (width, wide))
        self.shrink = nn.ModuleList(nn.Conv2d(n, n, 3, 2, 1) for n in (width, wide))
        self.middle = ResidualBlock(wide, wide, time)
        self.middle_attention = CrossAttentionBlock(wide, context)
        self.up = nn.ModuleList(
            [ResidualBlock(2 * wide, wide, time), ResidualBlock(wide + width, width, time)]
        )
        self.up_attention = nn.ModuleList(CrossAttentionBlock(n, context) for n in (wide, width))
        self.norm, self.last = nn.GroupNorm(4, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(self.width // 2, device=sample.device) / self.width)
        angles = timestep[:, None] * rates[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.first(sample), []
        for block, attend, shrink in zip(self.down, self.down_attention, self.shrink, strict=True):
            x = attend(block(x, time), context)
            skips.append(x)
            x = shrink(x)
        x = self.middle_attention(self.middle(x, time), context)
        for block, attend in zip(self.up, self.up_attention, strict=True):
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = attend(block(torch.cat([x, skip], dim=1), time), context)
        return self.last(F.silu(self.norm(x)))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """A DETR: convolutions, an encoder with positions, and queries that become boxes."""

    def __init__(self, width: int = 16, queries: int = 6) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, width, 3, 2, 1)
        )
        self.rows, self.columns = nn.Embedding(16, width // 2), nn.Embedding(16, width // 2)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 32, batch_first=True) for _ in range(2)
        )
        self.queries = nn.Embedding(queries, width)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 32, batch_first=True) for _ in range(2)
        )
        self.label, self.box = nn.Linear(width, 5), nn.Linear(width, 4)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        x = self.backbone(pixels)
        high, wide = x.shape[-2:]
        rows = self.rows(torch.arange(high, device=x.device))[:, None].expand(-1, wide, -1)
        columns = self.columns(torch.arange(wide, device=x.device))[None].expand(high, -1, -1)
        x = x.flatten(2).transpose(1, 2) + torch.cat([rows, columns], dim=-1).flatten(0, 1)
        for block in self.encoder:
            x = block(x)
        found = self.queries.weight[None].expand(len(x), -1, -1)
        for block in self.decoder:
            found = block(found, x)
        return {"logits": self.label(found), "boxes": self.box(found).sigmoid()}


class VariationalAutoencoder(nn.Module):
    """Draws its code from a normal distribution in the middle."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            *(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()),
            nn.Conv2d(8, 2 * width, 4, 2, 1),
        )
        self.decode = nn.Sequential(
            *(nn.ConvTranspose2d(width, 8, 4, 2, 1), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        mean, deviation = self.encode(pixels).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * deviation)
        distance: Tensor = (mean.square() + deviation.exp() - 1 - deviation).mean()
        return F.mse_loss(self.decode(code), pixels) + 0.1 * distance


def _segmented(num_samples: int, size: int) -> Batch:
    side = 16 + 8 * size
    target = tokens(num_samples, side * side).view(num_samples, side, side) % 5
    return noise(num_samples, 3, side, side), target


def _diffused(num_samples: int, size: int) -> Batch:
    side = 8 + 4 * size
    sample, target = noise(num_samples, 4, side, side), noise(num_samples, 4, side, side).flip(0)
    times = tokens(num_samples, 1)[:, 0].float()
    context = noise(num_samples, 5 + size, 12)
    return {"sample": sample, "timestep": times, "context": context}, target


def _with_boxes(num_samples: int, size: int) -> Batch:
    side = 24 + 8 * size
    boxes = noise(num_samples, 6, 4).sigmoid()
    labels = classes(num_samples)[:, None].expand(-1, 6).contiguous()
    return noise(num_samples, 3, side, side), {"boxes": boxes, "labels": labels}


def _detection_loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    labels = F.cross_entropy(output["logits"].transpose(1, 2), target["labels"])
    return labels + F.l1_loss(output["boxes"], target["boxes"])


def _pixels(num_samples: int, size: int) -> Batch:
    return noise(num_samples, 3, 16 + 8 * size, 16 + 8 * size), None


CASES = {
    "U-Net": lambda: Case(UNet(), _segmented, cross_entropy),
    "Stable Diffusion U-Net": lambda: Case(DiffusionUNet(), _diffused, F.mse_loss),
    "DETR": lambda: Case(Detector(), _with_boxes, _detection_loss),
    "variational autoencoder": lambda: Case(VariationalAutoencoder(), _pixels),
}
