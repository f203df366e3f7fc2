"""Rows in, rich tables out: the only room that knows rich."""
