"""A script that saves one checkpoint; tests kill it in the middle."""

import os

import torch

from holdfast.checkpoint import save

if __name__ == "__main__":
    value = float(os.environ["VALUE"])
    save(os.environ["PLACE"], {"w": torch.full((int(os.environ["SIZE"]),), value), "value": value})
