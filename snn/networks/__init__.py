"""Networks: bodies from architecture strings, and the heads that close them."""

from snn.networks.heads import DecoupledHead, SpikingHead
from snn.networks.srm_network import SRMNetwork, count_parameters

__all__ = ["DecoupledHead", "SRMNetwork", "SpikingHead", "count_parameters"]
