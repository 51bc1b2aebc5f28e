"""Evaluations of cache formats on real models, and what their programs share."""
