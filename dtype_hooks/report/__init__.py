"""Rows in, rich tables, pictures and files out: the only room that knows rich and matplotlib."""
