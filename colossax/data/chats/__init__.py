"""Conversations: the forms people have them in, as tokens of which answers are told, in rows."""
