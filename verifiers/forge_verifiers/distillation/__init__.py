"""`distill`: a small text classifier that imitates an ensemble, in well under a millisecond per trajectory on a CPU."""

from forge_verifiers.distillation.model import Agreement, Distilled, distill

__all__ = ["Agreement", "Distilled", "distill"]
