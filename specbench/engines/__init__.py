"""Other engines: is what they say what the target says?"""
