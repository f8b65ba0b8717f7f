"""Run the model of an `.emoe` package."""
