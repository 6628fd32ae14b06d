"""What callers may do: the list of allowed functions, limits and quotas, TLS."""
