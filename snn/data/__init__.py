"""Data sets held in memory: `load` builds the three loaders that a config names.

`sources` says where images come from, `augment` what a training image goes through, `loaders` how batches
are made.
"""

from snn.data.loaders import Batch, Loader, Loaders, check_settings, load
from snn.data.sources import Images

__all__ = ["Batch", "Images", "Loader", "Loaders", "check_settings", "load"]
