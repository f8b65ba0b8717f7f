"""Open an `.emoe` package and page its experts from flash into one fixed-size arena."""
