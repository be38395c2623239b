"""Modules of tools/check-machine-code. Only source.py needs CUDA's tools."""
