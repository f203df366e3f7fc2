"""The arithmetic and the bookkeeping, on torch alone: neither mmengine nor rich is imported here."""
