"""A stock model driven layer by layer, and how its passes are captured and replayed."""
