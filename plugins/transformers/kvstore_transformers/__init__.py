"""kvstore connector for Hugging Face transformers."""
