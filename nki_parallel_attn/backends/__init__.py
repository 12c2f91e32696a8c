"""How an operation is run: torch, the simulator, or a Neuron device."""
