"""`make compare`: Tandem beside other systems on this machine, and the cost of its control plane."""
