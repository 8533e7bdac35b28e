"""The verifier protocol, composition of verifiers, and the contract check. Start at `verifier`."""
