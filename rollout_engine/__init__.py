"""A model that answers: gRPC in front, one loop that owns the device behind."""

__version__ = "0.1.0"
