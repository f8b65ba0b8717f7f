"""Training a prefetch router: what the model's own router chooses, seen one attention block earlier.

Text runs through the model, and what enters each layer is kept beside what its router said (`recording`). From the
largest part of it a linear map to the router's distribution is learned (`fitting`), from a second one how many experts
beyond `top_k` are worth fetching (`confidence`), from a third how sure to be (`calibrating`); the rest tells how good
all that is (`report`), or a text of its own does. No token is in two parts.

Source: APEX (arXiv 2608.11688), a linear prefetch router before attention and an ordinal-logistic confidence model. The
features of the latter, the starts of training and the guarantee of calibration are our own.
"""
