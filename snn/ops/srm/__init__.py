"""The SRM layer as one op: synapse, neuron and time-based gradient. README.md holds the mathematics."""

from snn.ops.srm.op import srm_conv2d, srm_linear

__all__ = ["srm_conv2d", "srm_linear"]
