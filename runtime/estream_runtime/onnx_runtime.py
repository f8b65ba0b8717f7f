"""ONNX Runtime, told to collect nothing before it begins to.

Official builds otherwise note a number of the device, and events to be sent, in folders of whoever imports them.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

__all__ = ["onnxruntime"]
