"""Builds the ONNX graphs of a package, each once per shape class, with weights as inputs."""

from estream_packer.graphs.roles import build_graph

__all__ = ["build_graph"]
