"""The sample model: a small OLMoE trained on English novels in the public domain."""
