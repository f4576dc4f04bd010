"""kvstore for vLLM."""
