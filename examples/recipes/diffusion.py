"""Train a small diffusion model with BatchNorm and a moving average of its weights as a replica.

    REPLICA_RANK=0 python examples/recipes/diffusion.py URI FOLDER       one replica
    REPLICA_RANK=1 python examples/recipes/diffusion.py URI FOLDER       the other, anywhere

The statistics of BatchNorm and the moving average are buffers, which the group averages in each
round. The lines marked "diloco" are the difference to the script of a single worker.
"""

import os
import sys
from pathlib import Path

import tiny
import torch
from torch import nn

import diloco  # diloco

URI, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICA = int(os.environ.get("REPLICA_RANK", "0"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "1000"))
SIZE, TIMES, DECAY = 8, 50, 0.95
KEPT = torch.cumprod(1.0 - torch.linspace(1e-3, 0.2, TIMES), dim=0)
"""The part of an image's variance that is left after each time of the diffusion."""


class Denoiser(nn.Module):
    """Predicts the noise in images (rows, 1, SIZE, SIZE) at times (rows,)."""

    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(2)
        )
        self.last = nn.Conv2d(width, 1, 3, padding=1)
        for name, parameter in list(self.named_parameters()):
            self.register_buffer(f"ema_{name.replace('.', '_')}", parameter.detach().clone())

    def forward(self, images, times):
        x = self.first(images) + self.time(times)[..., None, None]
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    @torch.no_grad()
    def update_ema(self):
        """Move the average towards the weights, in place."""
        for name, parameter in self.named_parameters():
            self.get_buffer(f"ema_{name.replace('.', '_')}").lerp_(parameter, 1.0 - DECAY)

    def averaged(self):
        """Return a model with the averaged weights, for sampling."""
        model = Denoiser()
        model.load_state_dict(self.state_dict())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(self.get_buffer(f"ema_{name.replace('.', '_')}"))
        return model.eval()


def squares(rows, generator):
    """Return images of a bright square at a random place."""
    images = torch.full((rows, 1, SIZE, SIZE), -1.0)
    for image in images:
        x, y = torch.randint(SIZE - 3, (2,), generator=generator).tolist()
        image[:, y : y + 3, x : x + 3] = 1.0
    return images


def denoising_loss(model, generator, rows=16):
    images = squares(rows, generator)
    noise = torch.randn(images.shape, generator=generator)
    times = torch.randint(TIMES, (rows,), generator=generator)
    kept = KEPT[times][:, None, None, None]
    return (model(kept.sqrt() * images + (1 - kept).sqrt() * noise, times) - noise).square().mean()


torch.manual_seed(REPLICA)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = torch.Generator().manual_seed(REPLICA)
settings = diloco.GroupSettings(num_replicas=2, sync_every=5)  # diloco
with diloco.join(URI, model, optimizer, settings=settings, buffers="average") as group:  # diloco
    for _ in range(MAX_STEPS):
        loss = denoising_loss(model, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_ema()
        if not group.step(tokens=16, loss=loss.detach()):  # diloco
            break  # diloco

print(f"replica {REPLICA}: digest {tiny.digest(dict(model.named_parameters()))}")
exchanged = {name: t for name, t in model.named_buffers() if t.is_floating_point()}
print(f"replica {REPLICA}: buffers {tiny.digest(exchanged)}")
with torch.no_grad():
    held_out = denoising_loss(model.averaged(), torch.Generator().manual_seed(tiny.HELD_OUT), 256)
print(f"replica {REPLICA}: loss {float(held_out):.4f}")
torch.save(model.averaged().state_dict(), FOLDER / f"diffusion-{REPLICA}.pt")
