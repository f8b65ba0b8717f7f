"""Turn a Hugging Face checkpoint into one `.emoe` package."""
