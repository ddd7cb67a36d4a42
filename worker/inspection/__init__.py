"""What an adapter computes by PEFT, and what its weights look like."""
