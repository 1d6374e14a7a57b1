"""Networks: bodies from architecture strings, residual networks, and the heads that close them."""

from snn.networks.heads import DecoupledHead, SpikingHead
from snn.networks.network import count_parameters
from snn.networks.srm_network import SRMNetwork
from snn.networks.srm_resnet import SRMResNet

__all__ = ["DecoupledHead", "SRMNetwork", "SRMResNet", "SpikingHead", "count_parameters"]
