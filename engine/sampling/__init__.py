"""From logits to tokens: sampling, grammars, and when a sequence ends."""
