"""Time-based training of spiking networks, from configs."""
