"""The ops of time-based training: tensors in, tensors out.

Every op works on time-major tensors `[T, N, ...]`. Their gradients are definitions, not derivatives of the
forward: each docstring says which. None has a second derivative.
"""

from snn.ops.count_to_time import count_to_time, spike_heights
from snn.ops.gradient_by_height import gradient_by_height
from snn.ops.gradient_decouple import gradient_decouple
from snn.ops.lb_sign import lb_sign
from snn.ops.spike_add import spike_add
from snn.ops.spike_avg_pool2d import spike_avg_pool2d
from snn.ops.spike_dropout import spike_dropout
from snn.ops.srm import srm_conv2d, srm_linear, target_spikes

__all__ = [
    "count_to_time",
    "gradient_by_height",
    "gradient_decouple",
    "lb_sign",
    "spike_add",
    "spike_avg_pool2d",
    "spike_dropout",
    "spike_heights",
    "srm_conv2d",
    "srm_linear",
    "target_spikes",
]
