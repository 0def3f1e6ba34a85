"""Attention on the CPU: the torch backend, which runs anywhere, and the native decode kernel."""
