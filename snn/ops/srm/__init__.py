"""The SRM layer as one op: synapse, neuron and gradient. README.md holds the mathematics."""

from snn.ops.srm.op import srm_conv2d, srm_linear
from snn.ops.srm.target_spike import target_spikes

__all__ = ["srm_conv2d", "srm_linear", "target_spikes"]
