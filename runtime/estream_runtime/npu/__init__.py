"""Qualcomm's Hexagon tensor processor, by way of ONNX Runtime's provider for the QNN SDK."""
