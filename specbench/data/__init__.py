"""Texts: questions, conversations to train on, and checks that the two do not share any."""
