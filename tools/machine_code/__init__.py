"""What tools/check-machine-code is made of: nothing here needs CUDA but what runs its tools (source.py)."""
