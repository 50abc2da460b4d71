"""What `lapcli doctor` looks at: versions and their known-bad combinations, kernels against fp64, and two rates."""
