"""What the connectors of inference engines have in common; imports no engine."""
