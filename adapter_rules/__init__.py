"""What of PEFT's format the upload check and the engine must read alike; standard library only."""
